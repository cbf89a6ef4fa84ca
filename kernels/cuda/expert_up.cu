// The first half of a mixture of experts for few tokens: RMSNorm and absmax int8 of a token's row, its products with the gates and ups of
// an expert that it is routed to, and act(gate) * up of them, limited.
//
// Grid: [F / (8 * TILES), TOP, tokens]. Each block takes the token's experts up to its own from all logits, which costs less than a
// launch, and quantises the row for itself. A warp multiplies a tile of 8 gates and their 8 ups as in ternary_decode; KSPLIT warps share
// its K. COLS is a multiple of 256 * KSPLIT, F of 8, and a row of the matrices has one scale.
//
// The next kernel, expert_down, begins only when all blocks here have waited: it relies on the logits before it waits itself.
#include "expert.cuh"
#include "limit.cuh"
#include "route.cuh"
#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define STEPS (COLS / 256 / KSPLIT) /* of a warp */
#define VECTORS VECTORS_OF(COLS, THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
expert_up(const int *step, const float *x, const float *weight, float eps, const float *logits, const uint4 *codes, const unit_t *units,
          float limit, float *out) {
    __shared__ __align__(16) signed char x_shared[COLS];
#if KSPLIT > 1
    __shared__ int parts[WARPS][2][8];
#endif
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4, m = blockIdx.z;
    int part = warp % KSPLIT, f = (blockIdx.x * TILES + warp / KSPLIT) * 8 + group;  // of the results
    float4 v[VECTORS], gain[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) gain[i] = vector_or_zero(weight, threadIdx.x + i * THREADS, COLS);
    wait_for_before();
    start_dependents();
    if (m >= STEP_TOKENS(step)) return;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = vector_or_zero(x + (size_t)m * COLS, threadIdx.x + i * THREADS, COLS);
    Choice left;
    left.load(logits + (size_t)m * EXPERTS);
    int expert = 0;
    for (int j = 0; j <= blockIdx.y; j++) {
        float logit;
        expert = left.take(logit);
    }
    size_t gate = (size_t)expert * F + min(f, F - 1), up = gate + (size_t)EXPERTS * F;
    uint4 low[STEPS], high[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        int at = (s * KSPLIT + part) * 4 + quarter;
        low[s] = stream(codes + gate * (COLS / 64) + at), high[s] = stream(codes + up * (COLS / 64) + at);
    }
    float scale = norm_quant_row<WARPS, true>(v, gain, COLS, eps, [&](int k, int word) {
        if (k < COLS / 4) ((int *)x_shared)[place(k / 4) * 4 + k % 4] = word;
    });
    __syncthreads();

    int sums[4][4] = {};  // of these, column 0 is the token; the others repeat it
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const signed char *at = x_shared + (s * KSPLIT + part) * 256 + quarter * 16;
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
            uint4 a = pairs_at(low[s], 2 * plane), b = pairs_at(high[s], 2 * plane), y = *(const uint4 *)(at + plane * 64);
            mma(sums[2 * plane % 4], a.x, b.x, a.y, b.y, y.x, y.y);
            mma(sums[(2 * plane + 1) % 4], a.z, b.z, a.w, b.w, y.z, y.w);
        }
    }
    int of_gate = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]), of_up = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
#if KSPLIT > 1
    if (quarter == 0) parts[warp][0][group] = of_gate, parts[warp][1][group] = of_up;
    __syncthreads();
    if (part) return;
#pragma unroll
    for (int p = 1; p < KSPLIT; p++) of_gate += parts[warp + p][0][group], of_up += parts[warp + p][1][group];
#endif
    if (quarter || f >= F) return;
    float product = limited_product(value_of(of_gate, scale, units[gate]), value_of(of_up, scale, units[up]), limit);
    out[((size_t)m * TOP + blockIdx.y) * F + f] = product;
}
