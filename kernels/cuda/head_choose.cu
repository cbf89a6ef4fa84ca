// The token of each of up to 8 rows: scores from the weights themselves every row of the head that could still win by its rough
// score, 16 at a time, exactly as dense_mma does (the same products in the same order), and takes the greatest. A block
// looks at EACH * THREADS rows of the head; the one that finishes last stores the tokens.
#include "head.cuh"
#include "dense.cuh"
#define THREADS 256
#define PITCH (STAGE + 32) /* halves: so that neighbouring rows fall into different halves of the banks */

extern "C" __global__ void __launch_bounds__(THREADS)
head_choose(const int *step, CHOICE_FIELDS, const unsigned char *head, const float4 *params, const float *scores,
            const unsigned *least, const f16 *split, const float *scales, const f16 *weight, Candidate *best,
            unsigned *arrivals, int *out, int rows) {
    extern __shared__ __align__(16) f16 tiles[];  // [16 rows of the head, 8 high and 8 low halves of x][PITCH]
    __shared__ int listed[EACH * THREADS], found;
    __shared__ bool last;
    int lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4, begin = blockIdx.x * EACH * THREADS + threadIdx.x;
    float2 size[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) size[i] = ((const float2 *)(head + head_sizes_at(rows)))[min(begin + i * THREADS, rows - 1)];
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    wait_for_before();
    start_dependents();
    int count = STEP_ROWS(step);
    bool in[EACH] = {};
    for (int r = 0; r < count; r++) {
        float4 p = params[r];
        Choice choice = head_choice(step, CHOICE_AT, r);
        unsigned reached = least[r];
        float floor = key_float(reached) - (1e-5f + 1e-6f * fabsf(key_float(reached))), score[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) score[i] = scores[(size_t)r * rows + min(begin + i * THREADS, rows - 1)];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            float key = head_key(choice, score[i] + (p.z * size[i].x + p.w * size[i].y), begin + i * THREADS);
            in[i] |= reached == 0 || !(key < floor);  // what is no number stays in
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (in[i] && begin + i * THREADS < rows) listed[atomicAdd(&found, 1)] = begin + i * THREADS;
    }
    __syncthreads();
    for (int first = 0; first < found; first += 16) {
        DenseSums<4> sums = {};
        for (int from_k = 0; from_k < COLS; from_k += STAGE) {
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * (STAGE / 8); i += THREADS) {
                int row = i / (STAGE / 8), at = from_k + i % (STAGE / 8) * 8, r = row % 8;
                bool there = at < COLS && (row < 16 ? first + row < found : r < count);
                const f16 *from = row < 16 ? weight + (there ? (size_t)listed[first + row] * COLS + at : 0)
                                           : split + (there ? (size_t)(2 * r + row / 8 % 2) * COLS + at : 0);
                copy_async(tiles + row * PITCH + at - from_k, from, there);
            }
            asm volatile("cp.async.wait_all;");
            __syncthreads();
            if (threadIdx.x >= WARP) continue;
            const f16 *a = tiles + group * PITCH + quarter * 8, *x = tiles + (16 + group) * PITCH + quarter * 8;
#pragma unroll 4
            for (int k = 0; k < STAGE; k += 32) {
                uint4 upper = *(const uint4 *)(a + k), lower = *(const uint4 *)(a + 8 * PITCH + k);
#pragma unroll
                for (int low = 0; low < 2; low++) sums.add(upper, lower, *(const uint4 *)(x + low * 8 * PITCH + k), low);
            }
        }
        if (threadIdx.x >= WARP) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int at = first + group + i / 2 * 8, r = quarter * 2 + i % 2;
            if (at >= found || r >= count) continue;
            float key = head_key(head_choice(step, CHOICE_AT, r), sums.of(i) * (1.0f / scales[r]), listed[at]);
            atomicMax(best + r, candidate(key, listed[at]));
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrivals, gridDim.x - 1) == gridDim.x - 1;
    __syncthreads();
    if (!last || threadIdx.x >= count) return;
    out[threadIdx.x] = winner(*(volatile Candidate *)(best + threadIdx.x));
}
