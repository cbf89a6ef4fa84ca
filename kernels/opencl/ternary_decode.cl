// ternary_matmul for up to TOKENS (8) tokens, fused with the quantisation before it and the activation after it where possible.
// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), w in {-1, 0, 1} held as codes w + 1 in two bits.
//
// LANES work-items share a row of W and take 16 bytes of it at a time, neighbours next to one another. At each bit pair those
// hold 16 neighbours of K: pair 3 (the top) weights k..k+15, pair 2 those 32 further, and so on; two such chunks make 128 of K.
// Codes are multiplied, not weights; their offset of one adds the sum of x, which is subtracted at the end.
//
// INPUT 0: x is int8, with a scale and a sum for each token. 1: x is f32, one token: absmax int8 here. 2: the same after RMSNorm.
// Every group then quantises the row for itself, while its codes are on their way from memory.
// GLU: rows 0..rows/2-1 of W are gates, the others their ups, and out = act(gate) * up.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately
#include "quantized.clh"

#define ITERS ((CHUNKS + LANES - 1) / LANES)
#define GROUP_ROWS (WG / LANES)
#define TIMES (1 + GLU) /* rows of W for one of out */
#define SUMS (TIMES * TOKENS)

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void ternary_decode(
    global const int *step, global const void *input, global const float *scale, global const int *x_sums,
    global const float *norm, float eps, global const uint4 *codes, global const float *w_scale, global float *out, int rows) {
    local int parts[WG * SUMS];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES, first = get_group_id(0) * GROUP_ROWS;
    int outs = rows / TIMES, n = min(first + slot, outs - 1), tokens = STEP_TOKENS(step);
    global const uint4 *row[TIMES];
    UNROLL
    for (int r = 0; r < TIMES; r++) row[r] = codes + (size_t)(n + r * outs) * CHUNKS;
    int sums[TIMES][TOKENS];
    UNROLL
    for (int r = 0; r < TIMES; r++)
        UNROLL
        for (int t = 0; t < TOKENS; t++) sums[r][t] = 0;
#if INPUT
    local uint4 x[4 * CHUNKS];
    local float2 scratch[WG];
    uint4 held[TIMES][ITERS];  // fetched before the barriers of the quantisation
    UNROLL
    for (int i = 0; i < ITERS; i++)
        UNROLL
        for (int r = 0; r < TIMES; r++) held[r][i] = row[r][min(lane + i * LANES, CHUNKS - 1)];
    float2 made = quantized(input, (global const float4 *)norm, eps, (local uint *)x, scratch);
#endif
    UNROLL
    for (int i = 0; i < ITERS; i++) {
        int chunk = lane + i * LANES;
        if (chunk >= CHUNKS) break;
        uint4 code[TIMES];
#if INPUT
        UNROLL
        for (int r = 0; r < TIMES; r++) code[r] = held[r][i];
#else
        UNROLL
        for (int r = 0; r < TIMES; r++) code[r] = row[r][chunk];
#endif
        UNROLL
        for (int pair = 0; pair < 4; pair++) {
            uint4 c[TIMES];
            UNROLL
            for (int r = 0; r < TIMES; r++) c[r] = code[r] >> (6 - 2 * pair) & 0x03030303u;
            UNROLL
            for (int t = 0; t < TOKENS; t++) {
#if INPUT
                uint4 v = x[pair * CHUNKS + chunk];
#else
                uint4 v = load_x(input, min(t, tokens - 1), chunk / 2 * 128 + pair * 32 + chunk % 2 * 16);
#endif
                UNROLL
                for (int r = 0; r < TIMES; r++)
                    sums[r][t] = dot4(c[r].w, v.w, dot4(c[r].z, v.z, dot4(c[r].y, v.y, dot4(c[r].x, v.x, sums[r][t]))));
            }
        }
    }
    UNROLL
    for (int r = 0; r < TIMES; r++)
        UNROLL
        for (int t = 0; t < TOKENS; t++) parts[((t * GROUP_ROWS + slot) * TIMES + r) * LANES + lane] = sums[r][t];
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < TOKENS * GROUP_ROWS; i += WG) {
        int t = i / GROUP_ROWS, to = first + i % GROUP_ROWS;
        if (t >= tokens || to >= outs) continue;
#if INPUT
        float x_scale = made.x;
        int x_sum = (int)made.y;
#else
        float x_scale = scale[t];
        int x_sum = x_sums[t];
#endif
        float value[TIMES];
        UNROLL
        for (int r = 0; r < TIMES; r++) {
            int sum = -x_sum;
            for (int l = 0; l < LANES; l++) sum += parts[(i * TIMES + r) * LANES + l];
            value[r] = (float)sum * (x_scale * w_scale[to + r * outs]);
        }
#if GLU
        out[(size_t)t * outs + to] = act(value[0]) * value[1];
#elif ADD
        out[(size_t)t * outs + to] += value[0];
#else
        out[(size_t)t * outs + to] = value[0];
#endif
    }
}
