// ternary_matmul of weights with a scale for each GROUP of columns: out[m, n] = scale[m] * sum over s of f32(x_s . w_s) * w_scale[n, s].
// The sums of a group are exact, and the terms are added in the order that the contract states, so that the result has its bits.
//
// LANES work-items share HELD rows of W. Each takes a unit of columns at a time (one block of 128, or a group of more), and keeps the
// terms of its EACH groups in local memory, where one work-item a result adds them up. At each bit pair a chunk of 16 bytes holds
// 16 neighbours of K: pair 3 (the top) of the two chunks of a block weights k..k+31, pair 2 those 32 further, and so on.
//
// INPUT and GLU as in ternary_decode. With GLU, HELD is 2: a gate and its up. With PAIR, the work-groups of the second matrix are behind
// those of the first.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and each sum separately
#include "groups.clh"
#include "quantized.clh"
#include "pair.clh"

#define BLOCKS ((GROUP + 127) / 128) /* blocks of a unit */
#define PIECES (2 * BLOCKS) /* chunks of a unit */
#define UNITS ((COUNT + EACH - 1) / EACH)
#define ITERS ((UNITS + LANES - 1) / LANES)
#define ROWS (WG / LANES * HELD)
#define PITCH (COUNT / 2 * 2 + 1) /* of a row's terms, odd so that neighbours fall into different banks */
#define OUTS (ROWS / (1 + GLU)) /* rows of out of a work-group */

// AT_ONCE: tokens that a work-item multiplies together. Intel's GPUs lack registers for the sums of more tokens: on Gen9 where bytes
// are multiplied one by one, and on Gen12 for 8 tokens with groups of 32.
#if INTEL && !INT_DOT
#define AT_ONCE 1
#elif INTEL
#define AT_ONCE (TOKENS / (1 + TOKENS * EACH / 32)) /* half of them where they are 8 and EACH is 4 */
#else
#define AT_ONCE TOKENS
#endif

// The products of 16 weights and 16 activations.
inline int dot16(uint4 w, uint4 x, int sum) {
    return dot4_signed(w.w, x.w, dot4_signed(w.z, x.z, dot4_signed(w.y, x.y, dot4_signed(w.x, x.x, sum))));
}

// Row r of those in W that a work-item holds, where `slot` is the number of the first, and `group` the number of the work-group.
inline int row_of(int group, int slot, int r, int rows) {
    return GLU ? min(group * OUTS + slot / 2, rows / 2 - 1) + r * (rows / 2) : min(group * OUTS + slot + r, rows - 1);
}

// The sum of a row's terms in their order, times the factor of its token. A term times 1 is the term: Intel's compiler for CPUs would add
// more than 128 of them in another order if they were only added.
inline float scaled(local const float *terms, float factor) {
    float sum = 0.0f;
    for (int s = 0; s < COUNT; s++) sum = fma(terms[s], 1.0f, sum);
    return sum * factor;
}

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void ternary_groups(
    global const int *step, global const void *input, global const float *scale, global const int *x_sums,
    global const float *norm, float eps, global const uint4 *codes, global const half *w_scale, global float *out, int rows
        PAIR_ARGS(uint4, half)) {
    local float terms[ROWS * TOKENS * PITCH];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES * HELD, tokens = STEP_TOKENS(step);
    int token = get_group_id(1) * TOKENS, group = get_group_id(0);
#if PAIR
    int convolves = group < (rows + OUTS - 1) / OUTS;
    if (!convolves) group -= (rows + OUTS - 1) / OUTS, codes = codes2, w_scale = w_scale2, out = out2, rows = rows2;
#endif
#if GPU
    if (token >= tokens) return;
    int units = UNITS;
#else
    int units = token < tokens ? UNITS : 0;  // not a return: see expert_matmul.cl
#endif
#if INPUT
    local uint4 x[4 * CHUNKS];
    local float2 scratch[WG];
    uint4 held[HELD][ITERS][PIECES];  // fetched before the barriers of the quantisation
    UNROLL
    for (int i = 0; i < ITERS; i++)
        UNROLL
        for (int r = 0; r < HELD; r++)
            UNROLL
            for (int p = 0; p < PIECES; p++)
                held[r][i][p] = codes[(size_t)row_of(group, slot, r, rows) * CHUNKS + min((lane + i * LANES) * PIECES + p, CHUNKS - 1)];
    float x_scale = quantized(input, (global const float4 *)norm, eps, (local uint *)x, scratch).x;
#endif
    for (int part = 0; part < TOKENS; part += AT_ONCE) {
#if INPUT
        UNROLL
#else
        UNROLL_BY_8
#endif
        for (int i = 0; i < ITERS; i++) {
            int unit = lane + i * LANES;
            if (unit >= units) break;
            int found[HELD][AT_ONCE][EACH];
            UNROLL
            for (int r = 0; r < HELD; r++)
                UNROLL
                for (int t = 0; t < AT_ONCE; t++)
                    UNROLL
                    for (int j = 0; j < EACH; j++) found[r][t][j] = 0;
            for (int b = 0; b < BLOCKS; b++) {
                int block = unit * BLOCKS + b;
                uint4 low[HELD], high[HELD];
                UNROLL
                for (int r = 0; r < HELD; r++) {
#if INPUT
                    uint4 c = held[r][i][2 * b], d = held[r][i][2 * b + 1];
#else
                    global const uint4 *row = codes + (size_t)row_of(group, slot, r, rows) * CHUNKS + 2 * block;
                    uint4 c = row[0], d = row[1];
#endif
                    low[r] = SIGNED_CODES(c), high[r] = SIGNED_CODES(d);
                }
                UNROLL
                for (int plane = 0; plane < 4; plane++) {
                    int j = plane * EACH / 4;
                    UNROLL
                    for (int t = 0; t < AT_ONCE; t++) {
#if INPUT
                        uint4 v = x[plane * CHUNKS + 2 * block], w = x[plane * CHUNKS + 2 * block + 1];
#else
                        size_t m = min(token + part + t, tokens - 1);
                        uint4 v = load_x(input, m, block * 128 + plane * 32), w = load_x(input, m, block * 128 + plane * 32 + 16);
#endif
                        UNROLL
                        for (int r = 0; r < HELD; r++)
                            found[r][t][j] = dot16(TOP_PAIRS(high[r], plane), w, dot16(TOP_PAIRS(low[r], plane), v, found[r][t][j]));
                    }
                }
            }
            UNROLL
            for (int r = 0; r < HELD; r++)
                UNROLL
                for (int j = 0; j < EACH; j++) {
                    int s = unit * EACH + j;
                    if (s >= COUNT) continue;
                    float w = vload_half((size_t)row_of(group, slot, r, rows) * COUNT + s, w_scale);
                    UNROLL
                    for (int t = 0; t < AT_ONCE; t++) terms[((slot + r) * TOKENS + part + t) * PITCH + s] = (float)found[r][t][j] * w;
                }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < OUTS * TOKENS; i += WG) {
        int m = token + i % TOKENS, n = i / TOKENS, to = group * OUTS + n, outs = rows / (1 + GLU);
        if (m >= tokens || to >= outs) continue;
#if !INPUT
        float x_scale = scale[m];
#endif
        local const float *first = terms + (n * (1 + GLU) * TOKENS + i % TOKENS) * PITCH;
        float value = scaled(first, x_scale * UNFOLD);
#if GLU
        out[(size_t)m * outs + to] = act(value) * scaled(first + TOKENS * PITCH, x_scale * UNFOLD);
#elif ADD
        out[(size_t)m * outs + to] += value;
#elif PAIR
        float before[TAPS - 1], weights[TAPS];
        if (convolves) {
            fetch_column(before, weights, step, token_seq, state_from, state_to, m, to, conv_weight, conv_state, rows);
            value = convolved(before, weights, step, token_seq, state_to, m, to, conv_state, rows, value);
        }
        out[(size_t)m * rows + to] = value;
#else
        out[(size_t)m * outs + to] = value;
#endif
    }
}
