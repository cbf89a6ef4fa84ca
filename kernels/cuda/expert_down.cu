// The second half: absmax int8 of each expert's row, the products of these with the experts' matrices, and their sums with the experts'
// shares, in the router's order, added to the token's row.
//
// Grid: [rows / 16, tokens]. A warp has an expert and 16 rows of its matrix; it quantises the expert's row for itself. It takes all of the
// token's experts from the logits, and its codes are on their way, before the kernel waits for expert_up, which had waited for the
// logits' kernel before this one could begin. COLS is a multiple of 256, and a row of the matrices has one scale.
#include "expert.cuh"
#include "route.cuh"
#define STEPS (COLS / 256)
#define VECTORS (COLS / 4 / WARP)

extern "C" __global__ void __launch_bounds__(TOP * WARP)
expert_down(const int *step, const float *x, const float *logits, const uint4 *codes, const unit_t *units, float *out, int rows) {
    __shared__ __align__(16) signed char x_shared[TOP][COLS];
    __shared__ float results[TOP][16];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4, n0 = blockIdx.x * 16, m = blockIdx.y;
    start_dependents();
    if (m >= STEP_TOKENS(step)) return;
    Choice left;
    left.load(logits + (size_t)m * EXPERTS);
    int expert = 0;
    float first = 0.0f, total = 0.0f, share = 0.0f;
    for (int j = 0; j < TOP; j++) {
        float logit;
        int e = left.take(logit);
        if (j == 0) first = logit;
        float power = expf(logit - first);
        total += power;
        if (j == warp) expert = e, share = power;
    }
    share /= total;
    size_t row_low = (size_t)expert * rows + min(n0 + group, rows - 1), row_high = (size_t)expert * rows + min(n0 + group + 8, rows - 1);
    uint4 low[STEPS], high[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        low[s] = stream(codes + row_low * (COLS / 64) + s * 4 + quarter), high[s] = stream(codes + row_high * (COLS / 64) + s * 4 + quarter);
    }
    unit_t unit_low = units[row_low], unit_high = units[row_high];
    wait_for_before();
    float *to = out + (size_t)m * rows + n0 + threadIdx.x;
    bool adds = threadIdx.x < 16 && n0 + threadIdx.x < rows;
    float old = adds ? *to : 0.0f;
    const float4 *row = (const float4 *)(x + ((size_t)m * TOP + warp) * COLS);
    float4 v[VECTORS];
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = row[lane + i * WARP], largest = fmaxf(largest, magnitude(v[i]));
    largest = fmaxf(warp_max(largest), QUANT_FLOOR);
    float factor = 127.0f * reciprocal(largest), scale = largest * (1.0f / 127.0f);
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int k = lane + i * WARP;
        float4 scaled = times(v[i], factor);
        ((int *)x_shared[warp])[place(k / 4) * 4 + k % 4] = pack(scaled.x, scaled.y, scaled.z, scaled.w);
    }
    __syncwarp();
    int sums[4][4] = {};  // of these, column 0 is the token; the others repeat it
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
            uint4 a = pairs_at(low[s], 2 * plane), b = pairs_at(high[s], 2 * plane);
            uint4 y = *(const uint4 *)(x_shared[warp] + s * 256 + plane * 64 + quarter * 16);
            mma(sums[2 * plane % 4], a.x, b.x, a.y, b.y, y.x, y.y);
            mma(sums[(2 * plane + 1) % 4], a.z, b.z, a.w, b.w, y.z, y.w);
        }
    }
    if (quarter == 0) {
        int of_low = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]), of_high = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
        results[warp][group] = __fmul_rn(value_of(of_low, scale, unit_low), share);
        results[warp][group + 8] = __fmul_rn(value_of(of_high, scale, unit_high), share);
    }
    __syncthreads();
    if (!adds) return;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TOP; j++) sum = __fadd_rn(sum, results[j][threadIdx.x]);
    *to = __fadd_rn(old, sum);
}
