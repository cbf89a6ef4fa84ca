// Threshold that a row of the head must reach to be chosen: the key of the likeliest row, scored from the full weights, less what
// rounding may have added. One block a row of x.
#include "head.cuh"
#define ROUNDING 1e-4f /* share of the sum of magnitudes: 320 dependent sums, each truncated after 23 bits, and more */

extern "C" __global__ void head_floor(const int *step, CHOICE_FIELDS, const Candidate *likeliest, const f16 *split, const float *scales,
                                      const f16 *weight, float *floors, int rows) {
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
    if (threadIdx.x > 0) return;
    float key = head_key(head_choice(step, CHOICE_AT, r, rows), (sum - ROUNDING * magnitude) * (1.0f / scales[r]), n);
    floors[r] = top ? key - (1e-5f + 1e-6f * fabsf(key)) : -INFINITY_F;
}
