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
#if ONE
// As `stream` loads, and has the second-level cache fetch all of the 256 bytes around it.
__device__ __forceinline__ uint4 fetch_weights(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
#else
#define fetch_weights stream
#endif

// GATED: returns at once where none of its rows of x is undecided (decision 0026).
// ONE: there is one row of x, which is in shared memory as a whole, so that warps do not wait for one another.
#define SUMS (NT == 1 ? 4 : 1) /* as in head_choose, whose tokens must be those of these logits */
#include "dense.cuh"

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
                next[h][i] = k / 8 + i * 4 + quarter < COLS / 8 ? fetch_weights(from + i * 4) : make_uint4(0, 0, 0, 0);
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
#if ONE
    // The only row of x is there as a whole; lanes of other columns multiply by zeros.
    uint4 *both = (uint4 *)tiles;  // [high, low][COLS / 8]
    for (int i = threadIdx.x; i < 2 * (COLS / 8); i += WARPS * WARP) copy_async(both + i, split + (size_t)i * 8, true);
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    DenseSums<SUMS> sums[2][NT] = {};
    for (int k = 0; k < COLS; k += CHUNK) {
        uint4 now[4][LOADS];
#pragma unroll
        for (int i = 0; i < 4 * LOADS; i++) now[i / LOADS][i % LOADS] = next[i / LOADS][i % LOADS];
        fetch(k + CHUNK);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int at = k / 8 + i * 4 + quarter;
#pragma unroll
            for (int t = 0; t < 2; t++) {
                uint4 x = group == 0 && at < COLS / 8 ? both[t * (COLS / 8) + at] : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int h = 0; h < 2; h++) sums[h][0].add(now[2 * h][i], now[2 * h + 1][i], x, t);
            }
        }
    }
#else
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
#endif
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
