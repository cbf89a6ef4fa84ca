// route: the logits of all experts, then the greatest of them and their softmax.
#include "route.cuh"
#define WARPS (WG / WARP)
#define ROW_WARPS (WARPS / TOKEN_WARPS)
#define AHEAD (COLS / (4 * WARP)) /* where ONE: vectors of an expert's row that a lane has; it loads them before it waits */

// Grid: [experts, tokens], a warp for ROWS experts and TOKENS tokens. Its lanes share each row alike, so that equal rows of the router have
// equal logits. The norm is one factor of the whole row. ONE: the step has one token, and COLS is a multiple of 128.
extern "C" __global__ void __launch_bounds__(WG)
route_logits(const int *step, const float *x, const float *weight, float eps, const float *router, float *logits) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int m0 = (blockIdx.y * TOKEN_WARPS + warp % TOKEN_WARPS) * TOKENS, e0 = (blockIdx.x * ROW_WARPS + warp / TOKEN_WARPS) * ROWS;
    const float4 *gain = (const float4 *)weight, *of[ROWS], *row[TOKENS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) of[r] = (const float4 *)(router + (size_t)min(e0 + r, EXPERTS - 1) * COLS);
#if ONE
    float4 held[ROWS][AHEAD];
#pragma unroll
    for (int i = 0; i < ROWS * AHEAD; i++) held[i / AHEAD][i % AHEAD] = of[i / AHEAD][lane + i % AHEAD * WARP];
#endif
    start_dependents();
    wait_for_before();
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens || e0 >= EXPERTS) return;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) row[t] = (const float4 *)(x + (size_t)min(m0 + t, tokens - 1) * COLS);
    float dots[TOKENS][ROWS] = {}, sums[TOKENS] = {};
    auto add = [&](int k, const float4 (&w)[ROWS]) {
        float4 g = gain[k];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float4 v = row[t][k], y = times(v, g);
            sums[t] += squares(v);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float4 p = times(y, w[r]);
                dots[t][r] += (p.x + p.y) + (p.z + p.w);
            }
        }
    };
#if ONE
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        float4 w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = held[r][i];
        add(lane + i * WARP, w);
    }
#else
    for (int k = lane; k < COLS / 4; k += WARP) {
        float4 w[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = of[r][k];
        add(k, w);
    }
#endif
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float inverse = 1.0f / sqrtf(warp_reduce<Sum>(sums[t]) / COLS + eps);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float dot = warp_reduce<Sum>(dots[t][r]) * inverse;
            if (lane == 0 && m0 + t < tokens && e0 + r < EXPERTS) logits[(size_t)(m0 + t) * EXPERTS + e0 + r] = dot;
        }
    }
}

// A warp a token.
extern "C" __global__ void __launch_bounds__(WG)
route_top(const int *step, const float *logits, int *ids, float *shares, int top) {
    int m = blockIdx.x * WARPS + threadIdx.x / WARP;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    Choice left;
    left.load(logits + (size_t)m * EXPERTS);
    float first = 0.0f, total = 0.0f;
    for (int j = 0; j < top; j++) {
        float logit;
        int expert = left.take(logit);
        if (j == 0) first = logit;
        float power = expf(logit - first);
        total += power;
        if (threadIdx.x % WARP == 0) ids[(size_t)m * top + j] = expert, shares[(size_t)m * top + j] = power;
    }
    if (threadIdx.x % WARP == 0) {
        for (int j = 0; j < top; j++) shares[(size_t)m * top + j] /= total;
    }
}
