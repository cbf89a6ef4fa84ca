// Rows of x for the compact head: evened out as its columns are, in 16 bits, whose high and low eight are two
// rows of bytes, or in 8; and for dense_mma, which scores in full. Also the bound of a score's error. One block a row.
//
// PLANES 1: 8 bits, rounded up or down by a dither, so that errors are independent and zero on average. Each is one of two numbers
// that are `unit` apart: sub-Gaussian with a variance of at most unit^2 / 4, whatever x is.
//
// NORM: does the work of norm_rows first, to the bit: the tokens must be those of its logits.
#include "head.cuh"
#include "dense.cuh"
#define THREADS 256
#define EACH (COLS / THREADS) /* COLS is a multiple of 256 */
#define LIMIT (PLANES == 2 ? 32512.0f : 126.5f) /* 127 * 256; 126.5 + 1 is 127 at most */
#define DEVIATIONS (7.5f * 0.288675135f * 1.01f) /* t / sqrt(12), and 1 % for rounding to f32 */
#define DITHER_DEVIATIONS (7.5f * 0.5f * 1.01f)

// Where head_score's products of a warpgroup have column k: a thread's 16 bytes of codes are 32 columns, of which each step of 32 takes
// 4 and 4, of four threads.
__device__ __forceinline__ int in_steps(int k) { return k & ~0x6C | (k >> 5 & 3) << 2 | (k >> 2 & 3) << 5; }

extern "C" __global__ void __launch_bounds__(THREADS)
head_rows(const int *step, int rows_at, const float *x, const float *norm, float eps, const unsigned char *head, int rows, signed char *planes, float4 *params,
          f16 *split, float *scales, Candidate *likeliest, Candidate *best) {
    int r = blockIdx.x;
    const float *column = (const float *)(head + head_columns_at(rows));
    float mine[EACH], size[EACH], gain[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        size[i] = column[threadIdx.x + i * THREADS];
        gain[i] = NORM ? norm[threadIdx.x + i * THREADS] : 1.0f;
    }
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float *row = x + (size_t)(NORM ? step[rows_at + r] : r) * COLS;
    float inverse_norm = NORM ? inverse_rms((const float4 *)row, COLS, eps) : 1.0f;
    float largest = 0.0f, evened = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        mine[i] = row[threadIdx.x + i * THREADS] * inverse_norm * gain[i];
        largest = fmaxf(largest, fabsf(mine[i]));
        evened = fmaxf(evened, fabsf(mine[i] * size[i]));
        square += mine[i] * size[i] * (mine[i] * size[i]);
    }
    largest = block_reduce<Max>(largest);
    evened = block_reduce<Max>(evened);
    square = block_reduce<Sum>(square);
    float scale = split_scale(largest), unit = evened / LIMIT, inverse = evened > 0.0f ? LIMIT / evened : 0.0f;
    float base = 0.0f, lost = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int k = threadIdx.x + i * THREADS;
        split_store(split + (size_t)r * 2 * COLS + k, COLS, mine[i] * scale);
        float y = mine[i] * size[i];
#if PLANES == 2
        int q = __float2int_rn(y * inverse), high = (q + 128) >> 8;
        planes[(size_t)(2 * r) * COLS + k] = (signed char)high;
        planes[(size_t)(2 * r + 1) * COLS + k] = (signed char)(q - 256 * high);
#else
        int q = __float2int_rd(y * inverse + head_dither(COLS + k));
        planes[(size_t)r * COLS + (WGMMA ? in_steps(k) : k)] = (signed char)q;
#endif
        base += (float)q * head_offset(k);
        float rest = y - (float)q * unit;
        lost += rest * rest;
    }
    base = block_reduce<Sum>(base);
    lost = block_reduce<Sum>(lost);
    if (threadIdx.x == 0) {
        float rounded = PLANES == 2 ? sqrtf(lost) * 1.01f : unit * DITHER_DEVIATIONS;
        params[r] = make_float4(unit, base, sqrtf(square) * DEVIATIONS, rounded);
        scales[r] = scale;
        likeliest[r] = best[r] = 0;
    }
}
