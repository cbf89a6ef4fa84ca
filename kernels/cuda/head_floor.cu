// Threshold that a row of the head must reach to be chosen: the key of the likeliest row, scored from the full weights, less what
// rounding may have added. One block a row of x.
//
// FILTERED: also the rate at which rows of the head are taken (filter.cuh), from the masses that each block of head_score found.
#include "head.cuh"
#define ROUNDING 1e-4f /* share of the sum of magnitudes: 320 dependent sums, each truncated after 23 bits, and more */

extern "C" __global__ void head_floor(const int *step, CHOICE_FIELDS, const Candidate *likeliest, const f16 *split, const float *scales,
                                      const f16 *weight, float *floors,
#if FILTERED
                                      const Mass *masses, int parts, float *log_rates, unsigned *bars, int *counts,
#endif
                                      int rows) {
    int r = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
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
#if FILTERED
    __shared__ Mass warps[WARP];
    Mass mass = NO_MASS;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) mass.add(masses[r * parts + i]);
    for (int lanes = 1; lanes < WARP; lanes *= 2) mass.add(mass.across(lanes));
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = mass;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < blockDim.x / WARP; w++) mass.add(warps[w]);
        log_rates[r] = logf(SAMPLES) - (mass.peak + logf(mass.sum));
        bars[r] = 0, counts[r] = 0;
    }
#endif
    if (threadIdx.x > 0) return;
    float key = head_key(head_choice(step, CHOICE_AT, r, rows), (sum - ROUNDING * magnitude) * (1.0f / scales[r]), n);
    floors[r] = top ? key - (1e-5f + 1e-6f * fabsf(key)) : -INFINITY_F;
}
