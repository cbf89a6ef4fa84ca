// dense_matmul of f16 weights for several rows of x, on the tensor cores.
//
// A block has WARPS warps of 32 weight rows, and NT * 8 rows of x in shared memory, CHUNK columns at a time. Small blocks end closer
// to one another, and large ones read x less often. As in ternary_decode, a
// thread takes 16 bytes of weights as they lie, and x follows the order of K that this gives.
#define CHUNK (NT == 1 ? 128 : 64) /* few rows of x leave registers for more weights on their way */
#define WARPS (NT == 1 ? 4 : 8)
#define PITCH (CHUNK + 16) /* halves: two of them are 64 bytes more than whole rounds of the banks, for neighbouring rows of x */
#define LOADS (CHUNK / 32)
#define STAGE (NT * 8 * 2 * PITCH)

// GATED: returns at once where none of its rows of x is undecided (decision 0026).
#define SUMS (NT == 1 ? 4 : 1) /* as in head_choose, whose tokens must be those of these logits */
#include "dense.cuh"

// Each row of x as two rows of halves, and the power of two by which it was scaled. One block a row.
extern "C" __global__ void split_rows(const int *step, const float *x, f16 *split, float *scales) {
    int r = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float *from = x + (size_t)r * COLS;
    float largest = 0.0f;
    for (int k = threadIdx.x; k < COLS; k += blockDim.x) largest = fmaxf(largest, fabsf(from[k]));
    largest = block_reduce<Max>(largest);
    float scale = split_scale(largest);
    for (int k = threadIdx.x; k < COLS; k += blockDim.x) split_store(split + (size_t)r * 2 * COLS + k, COLS, from[k] * scale);
    if (threadIdx.x == 0) scales[r] = scale;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, NT == 1 ? 3 : 2)
dense_mma(const int *step, const f16 *split, const float *scales, const uint4 *weight, float *out,
#if GATED
          const int *undecided,
#endif
          int rows) {
    extern __shared__ __align__(16) f16 tiles[];  // [2][NT * 8 rows][high, low][PITCH]
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = (blockIdx.x * WARPS + warp) * 32 + group, first = blockIdx.y * NT * 8;
    uint4 next[4][LOADS];  // for the rows n0, n0 + 8, n0 + 16, n0 + 24
    auto fetch = [&](int k) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const uint4 *from = weight + (size_t)min(n0 + 8 * h, rows - 1) * (COLS / 8) + quarter + k / 8;
#pragma unroll
            for (int i = 0; i < LOADS; i++)
                next[h][i] = k / 8 + i * 4 + quarter < COLS / 8 ? stream(from + i * 4) : make_uint4(0, 0, 0, 0);
        }
    };
#if !GATED
    fetch(0);
#endif
    wait_for_before();
    start_dependents();
    int count = STEP_ROWS(step) - first;
    if (count <= 0) return;
#if GATED
    int any = 0;
    for (int r = 0; r < min(count, NT * 8); r++) any |= undecided[first + r];
    if (!any) return;
    fetch(0);
#endif
    auto fetch_x = [&](int k) {
        for (int i = threadIdx.x; i < NT * 8 * 2 * (CHUNK / 8) && k < COLS; i += WARPS * WARP) {
            int r = i / (CHUNK / 8), at = k + i % (CHUNK / 8) * 8;  // r: a half row
            bool there = r / 2 < count && at < COLS;
            copy_async(tiles + k / CHUNK % 2 * STAGE + r * PITCH + at - k, split + (there ? (size_t)(first * 2 + r) * COLS + at : 0), there);
        }
    };
    fetch_x(0);
    DenseSums<SUMS> sums[2][NT] = {};
    for (int k = 0; k < COLS; k += CHUNK) {
        asm volatile("cp.async.wait_all;");
        __syncthreads();
        fetch_x(k + CHUNK);
        uint4 now[4][LOADS];
#pragma unroll
        for (int i = 0; i < 4 * LOADS; i++) now[i / LOADS][i % LOADS] = next[i / LOADS][i % LOADS];
        fetch(k + CHUNK);
        const f16 *tile = tiles + k / CHUNK % 2 * STAGE + group * 2 * PITCH + quarter * 8;
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
#pragma unroll
            for (int t = 0; t < NT * 2; t++) {
                uint4 x = *(const uint4 *)(tile + (t / 2 * 16 + t % 2) * PITCH + i * 32);
#pragma unroll
                for (int h = 0; h < 2; h++) sums[h][t / 2].add(now[2 * h][i], now[2 * h + 1][i], x, t % 2);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < NT; t++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = t * 8 + quarter * 2 + i;
            if (r >= count) break;
            float undo = 1.0f / scales[first + r];
#pragma unroll
            for (int h = 0; h < 4; h++) {
                if (n0 + 8 * h < rows) out[(size_t)(first + r) * rows + n0 + 8 * h] = sums[h / 2][t].of(h % 2 * 2 + i) * undo;
            }
        }
    }
}
