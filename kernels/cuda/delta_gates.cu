// delta_gates: decays and strengths of the delta rule, from rows of the residual stream. Few tokens have a block for each head of
// each; more have one for TOKENS of them and ROWS rows of alpha or beta for KSPLIT warps, which share the columns, so that rows of the
// weights are read less often.
#include "gates.cuh"
#define WARPS (WG / WARP)

extern "C" __global__ void __launch_bounds__(WG)
delta_gates(const int *step, const float *x, const float *weight, float eps, const float *alpha, const float *beta,
            const float *bias, const float *rate, float *out, int width, int heads) {
    int h = blockIdx.x, m = blockIdx.y;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)m * width), *gain = (const float4 *)weight;
    const float4 *a = (const float4 *)(alpha + (size_t)h * width), *b = (const float4 *)(beta + (size_t)h * width);
    Gates gates[1];
#pragma unroll 4
    for (int i = threadIdx.x; i < width / 4; i += WG) gates[0].add(row[i], gain[i], a[i], b[i]);
    finish_gates(gates, 1, h, out + (size_t)m * 2 * heads, bias, rate, width, heads, eps);
}

#if TOKENS
extern "C" __global__ void __launch_bounds__(WG)
delta_gates_tile(const int *step, const float *x, const float *weight, float eps, const float *alpha, const float *beta,
                 const float *bias, const float *rate, float *out, int width, int heads) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, part = warp % KSPLIT;
    int first = (blockIdx.x * (WARPS / KSPLIT) + warp / KSPLIT) * ROWS, m0 = blockIdx.y * TOKENS;
    start_dependents();
    wait_for_before();
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    const float4 *gain = (const float4 *)weight, *rows[TOKENS], *matrix[ROWS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) rows[t] = (const float4 *)(x + (size_t)min(m0 + t, tokens - 1) * width);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        int row = min(first + r, 2 * heads - 1);
        matrix[r] = (const float4 *)((row < heads ? alpha : beta) + (size_t)(row % heads) * width);
    }
    float dots[TOKENS][ROWS] = {}, sums[TOKENS] = {};
    for (int i = part * WARP + lane; i < width / 4; i += KSPLIT * WARP) {
        float4 w[ROWS], g = gain[i];
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = matrix[r][i];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float4 v = rows[t][i], y = times(v, g);
            sums[t] += squares(v);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float4 p = times(y, w[r]);
                dots[t][r] += (p.x + p.y) + (p.z + p.w);
            }
        }
    }
    __shared__ float parts[WARPS][TOKENS][ROWS + 1];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float sum = warp_reduce<Sum>(sums[t]);
        if (lane == 0) parts[warp][t][ROWS] = sum;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float dot = warp_reduce<Sum>(dots[t][r]);
            if (lane == 0) parts[warp][t][r] = dot;
        }
    }
    __syncthreads();
    for (int i = part * WARP + lane; i < TOKENS * ROWS; i += KSPLIT * WARP) {
        int t = i / ROWS, r = i % ROWS;
        float sum = 0.0f, dot = 0.0f;
        for (int w = warp - part; w < warp - part + KSPLIT; w++) sum += parts[w][t][ROWS], dot += parts[w][t][r];
        if (m0 + t < tokens && first + r < 2 * heads)
            put_gate(out + (size_t)(m0 + t) * 2 * heads, first + r, dot / sqrtf(sum / width + eps), bias, rate, heads);
    }
}
#endif
