// Each row of x as two rows of halves, and the power of two by which it was scaled. One block a row.
//
// NORM: of the rows that need logits, each normed first, exactly as head_rows does.
#include "dense.cuh"
#define THREADS 256
#define EACH ((COLS + THREADS - 1) / THREADS)

extern "C" __global__ void __launch_bounds__(THREADS)
split_rows(const int *step, int rows, const float *x, const float *norm, float eps, f16 *split, float *scales) {
    int r = blockIdx.x;
    float mine[EACH], gain[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) gain[i] = NORM && threadIdx.x + i * THREADS < COLS ? norm[threadIdx.x + i * THREADS] : 1.0f;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float *row = x + (size_t)(NORM ? step[rows + r] : r) * COLS;
    float inverse_norm = NORM ? inverse_rms((const float4 *)row, COLS, eps) : 1.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int k = threadIdx.x + i * THREADS;
        mine[i] = k < COLS ? row[k] * inverse_norm * gain[i] : 0.0f;
        largest = fmaxf(largest, fabsf(mine[i]));
    }
    largest = block_reduce<Max>(largest);
    float scale = split_scale(largest);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int k = threadIdx.x + i * THREADS;
        if (k < COLS) split_store(split + (size_t)r * 2 * COLS + k, COLS, mine[i] * scale);
    }
    if (threadIdx.x == 0) scales[r] = scale;
}
