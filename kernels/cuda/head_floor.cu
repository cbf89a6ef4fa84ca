// The threshold that a row of the head must reach to be chosen: the key of the likeliest row, scored with the full
// weights, minus the maximum rounding error. One block a row of x.
//
// FILTERED: other blocks count the rows of the head by their u (filter.cuh), in steps of 1 / BINS_EACH below the greatest. The block
// that finishes last finds the rate that takes SAMPLES of them on average. Rows beyond the last step are counted in it.
#include "head.cuh"
#if FILTERED
#define BINS_EACH 8
#define COPIES 8 /* of the counts, for neighbouring lanes */

__device__ __forceinline__ void find_rate(const Choice &choice, float4 params, const float2 *sizes, const float *scores, float peak,
                                          int *counts, unsigned *arrivals, float *log_rate, int rows) {
    __shared__ int parts[BINS * (COPIES + 1)];  // one more, so that copies are in different banks
    __shared__ float counted[BINS];
    __shared__ bool last, fits[BINS / WARP];
    for (int i = threadIdx.x; i < BINS * (COPIES + 1); i += BINS) parts[i] = 0;
    __syncthreads();
    int stride = (gridDim.y - 1) * BINS;
#pragma unroll 4
    for (int n = (blockIdx.y - 1) * BINS + threadIdx.x; n < rows; n += stride) {
        float below = peak - head_size(PLANES, choice, params, sizes[n], scores[n], n);
        int bin = fminf(fmaxf(below * BINS_EACH, 0.0f), BINS - 1.0f);
        atomicAdd(parts + bin * (COPIES + 1) + threadIdx.x % COPIES, 1);
    }
    __syncthreads();
    int mine = 0;
    for (int i = 0; i < COPIES; i++) mine += parts[threadIdx.x * (COPIES + 1) + i];
    if (mine) atomicAdd(counts + threadIdx.x, mine);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrivals, gridDim.y - 2) == gridDim.y - 2;
    __syncthreads();
    if (!last) return;
    counted[threadIdx.x] = *(volatile int *)(counts + threadIdx.x);
    float low = -20.0f, width = 20.0f + BINS / BINS_EACH;  // where the logarithm of the rate is, with the greatest u at 0
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int turn = 0; turn < 4; turn++) {
        width *= 1.0f / (BINS / WARP + 1);
        __syncthreads();
        float sum = 0.0f;
        for (int i = lane; i < BINS; i += WARP) sum += counted[i] * fminf(expf(low + (warp + 1) * width - i * (1.0f / BINS_EACH)), 1.0f);
        sum = warp_reduce<Sum>(sum);
        if (lane == 0) fits[warp] = sum <= SAMPLES;
        __syncthreads();
        for (int w = 0; w < BINS / WARP; w++) low += fits[w] ? width : 0.0f;
    }
    if (threadIdx.x == 0) *log_rate = low - peak;
}
#endif
#define ROUNDING 1e-4f /* share of the sum of magnitudes: 320 dependent sums, each truncated after 23 bits, and more */

extern "C" __global__ void head_floor(const int *step, CHOICE_FIELDS, const Candidate *likeliest, const f16 *split, const float *scales,
                                      const f16 *weight, float *floors,
#if FILTERED
                                      const unsigned char *head, const float4 *params, const float *scores, const unsigned *peaks,
                                      int *bins, unsigned *arrivals, float *log_rates,
#endif
                                      int rows) {
    int r = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
#if FILTERED
    if (blockIdx.y > 0) {
        Choice choice = head_choice(step, CHOICE_AT, r, rows);
        if (choice.filter.on) {
            find_rate(choice, params[r], (const float2 *)(head + head_sizes_at(rows)), scores + (size_t)r * rows,
                      key_float(peaks[r]), bins + r * BINS, arrivals + r, log_rates + r, rows);
        }
        return;
    }
#endif
    Candidate top = likeliest[r];
    int n = winner(top);
    const uint4 *w = (const uint4 *)(weight + (size_t)n * COLS), *x = (const uint4 *)(split + (size_t)r * 2 * COLS);
    float sum = 0.0f, magnitude = 0.0f;
#pragma unroll 2
    for (int i = threadIdx.x; i < COLS / 8; i += blockDim.x) {
        Eight a = expand(w[i]), high = expand(x[i]), low = expand(x[i + COLS / 8]);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            float product = a.v[d] * (high.v[d] + low.v[d]);
            sum += product;
            magnitude += fabsf(product);
        }
    }
    sum = block_reduce<Sum>(sum);
    magnitude = block_reduce<Sum>(magnitude);
    if (threadIdx.x > 0) return;
    float key = head_key(head_choice(step, CHOICE_AT, r, rows), (sum - ROUNDING * magnitude) * (1.0f / scales[r]), n);
    floors[r] = top ? key - (1e-5f + 1e-6f * fabsf(key)) : -INFINITY_F;
}
