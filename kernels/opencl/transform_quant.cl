// Quantisations with a Hadamard transform, whole: norm_quant, glu_norm_quant (KIND 1) and gated_quant (KIND 2), the last also without a
// transform (BITS 0). One work-group a token. `other` is the gate of gated_quant, `sums` as in norm_quant.
//
// A transform has blocks of 2^BITS elements. The work-group takes WG * 16 elements of a row at a time, PASSES times. A work-item holds
// those that differ in four neighbouring bits of their number, at first the highest of a block, and takes the transform's steps over
// these bits; then all exchange them for those of the next four bits, until they hold sixteen neighbours.
//
// GATES, on GPUs: more work-groups, behind those of TOKENS rows, have delta_gates of the same rows and norm: one a head of a token.
#define EACH 16
#define TILE (WG * EACH)
#define STAGES (BITS > 0 ? (BITS + 3) / 4 : 1)
#define PLACE(stage) max(BITS - 4 * ((stage) + 1), 0) /* the lowest of the bits that a work-item's elements differ in */
// Element j of this work-item in a tile, and where local memory has it: one place in 17 is left out, so that neighbours fall into
// different banks.
#define ELEMENT(place, j) ((lane >> (place) << ((place) + 4)) + ((j) << (place)) + (lane & (1 << (place)) - 1))
#define PADDED(e) ((e) + ((e) >> 4))
// The head of x whose result is head `to`.
#define HEAD_OF(to) (UNTILE ? (to) % (DIM / HEAD / max(UNTILE, 1)) * UNTILE + (to) / (DIM / HEAD / max(UNTILE, 1)) : (to))
#if NORM && KIND < 2
#define ROW_NORM 1
#else
#define ROW_NORM 0
#endif
#if GATES
#include "delta_gates.clh"
#define GATES_ARGS \
    , global const float4 *alpha, global const float4 *beta, global const float *bias, global const float *rate, global float *gates, int heads
#else
#define GATES_ARGS
#endif

// The transform's steps over the lowest `bits` bits of the number of an element among a work-item's.
inline void take_steps(float *v, int bits) {
    UNROLL
    for (int bit = 0; bit < 4; bit++) {
        if (bit >= bits) break;
        UNROLL
        for (int i = 0; i < EACH / 2; i++) {
            int low = 2 * i - (i & (1 << bit) - 1), high = low + (1 << bit);
            float a = v[low], b = v[high];
            v[low] = a + b;
            v[high] = a - b;
        }
    }
}

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void transform_quant(
    global const int *step, global const float *x, global const float *other, global const float *weight, global const float *signs,
    float eps, global char *out, global float *scale, global int *sums GATES_ARGS) {
    local float tile[WG * (EACH + 1)];
    local float2 scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
#if GATES
    if (m >= TOKENS) {
        int h = (m - TOKENS) % heads, token = (m - TOKENS) / heads;
        put_gates(h, token < STEP_TOKENS(step), (global const float4 *)(x + (size_t)token * DIM), (global const float4 *)weight, eps, alpha,
                  beta, bias, rate, gates + (size_t)token * 2 * heads, DIM, heads, scratch);
#if GPU
        return;
#endif
    }
#endif
    int there = m < STEP_TOKENS(step);  // not a return: see norm_rows.cl
    size_t row = there ? (size_t)m * DIM : 0;
    float held[PASSES][EACH], squares = 0.0f, largest = 0.0f;
    UNROLL
    for (int pass = 0; pass < PASSES; pass++) {
        UNROLL
        for (int j = 0; j < EACH; j++) {
            int e = pass * TILE + ELEMENT(PLACE(0), j);
            float y = 0.0f;
            if (e < DIM) {
#if KIND == 0
                y = x[row + e];
#elif KIND == 1
                y = act(x[2 * row + e]) * x[2 * row + DIM + e];
#else
                size_t from = row + HEAD_OF(e / HEAD) * HEAD + e % HEAD;
                float gate = other[from];
                y = x[from] * (SILU ? silu(gate) : sigmoid(gate));
#if NORM
                y *= weight[e % HEAD];
#endif
#endif
#if ROW_NORM
                squares += y * y;
                y *= weight[e];
#endif
                if (SIGNS) y *= signs[e];
            }
            held[pass][j] = y;
        }
    }
#if KIND == 2 && NORM  // the factor of each head
    local float factors[DIM / HEAD];
    for (int i = lane; i < DIM / EACH; i += WG) {
        global const float4 *part = (global const float4 *)(x + row) + i * (EACH / 4);
        tile[i] = dot(part[0], part[0]) + dot(part[1], part[1]) + dot(part[2], part[2]) + dot(part[3], part[3]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int h = lane; h < DIM / HEAD; h += WG) {
        float sum = 0.0f;
        for (int i = 0; i < HEAD / EACH; i++) sum += tile[h * (HEAD / EACH) + i];
        factors[h] = 1.0f / sqrt(sum / HEAD + eps);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    UNROLL
    for (int pass = 0; pass < PASSES; pass++) {
        float *v = held[pass];
#if KIND == 2 && NORM
        UNROLL
        for (int j = 0; j < EACH; j++) v[j] *= factors[HEAD_OF(min(pass * TILE + ELEMENT(PLACE(0), j), DIM - 1) / HEAD)];
#endif
        UNROLL
        for (int stage = 0; stage < STAGES; stage++) {
            int place = PLACE(stage);
            if (stage) {
                barrier(CLK_LOCAL_MEM_FENCE);
                UNROLL
                for (int j = 0; j < EACH; j++) v[j] = tile[PADDED(ELEMENT(place, j))];
            }
            take_steps(v, BITS - 4 * stage - place);
            if (stage + 1 == STAGES) break;
            if (pass && !stage) barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int j = 0; j < EACH; j++) tile[PADDED(ELEMENT(place, j))] = v[j];
        }
        UNROLL
        for (int j = 0; j < EACH; j++) largest = fmax(largest, fabs(v[j]));
    }
    float2 found = group_sum_max((float2)(squares, largest), scratch);
    float factor = 1.0f / sqrt((float)(1 << BITS));
#if ROW_NORM
    factor *= 1.0f / sqrt(found.x / DIM + eps);
#endif
    largest = fmax(found.y * factor, QUANT_FLOOR);
    factor *= 127.0f / largest;
    int sum = 0;
    UNROLL
    for (int pass = 0; pass < PASSES; pass++) {
        uint words[4];
        UNROLL
        for (int j = 0; j < 4; j++) {
            float *v = held[pass] + 4 * j;
            words[j] = as_uint(convert_char4_sat_rte((float4)(v[0], v[1], v[2], v[3]) * factor));
            sum = dot4(0x01010101u, words[j], sum);  // beyond the row the values are zero
        }
        int e = pass * TILE + lane * EACH;
        if (there && e < DIM) *(global uint4 *)(out + row + e) = (uint4)(words[0], words[1], words[2], words[3]);
    }
    float total = group_sum((float)sum, scratch);  // exact: below 2^24, as are its parts
    if (lane == 0 && there) {
        scale[m] = largest / 127.0f;
        sums[m] = (int)total;
    }
}
