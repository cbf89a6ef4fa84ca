// The token of each of up to 64 rows: scores from the full weights every row of the head that could still win by its rough
// score, 16 at a time, exactly as dense_mma does (the same products in the same order), and takes the greatest. A block
// looks at EACH * THREADS rows of the head for 8 of the rows; the one that finishes last stores the tokens.
#include "head.cuh"
#include "dense.cuh"
#define THREADS 256
#define WARPS (THREADS / WARP)
#define PITCH (STAGE + 16) /* halves: so that neighbouring rows of x fall into different halves of the banks */
#define MANY (TOKENS < 8 ? TOKENS : 8)
#define SUMS (TOKENS <= 8 ? 4 : 1) /* as dense_mma has them */
#define TOGETHER (EACH < 4 ? EACH : 4)
#define DEPTH (BLOCKS == 1 ? 8 : 4)
#define AHEAD 128 /* rows of the head */

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
head_choose(const int *step, CHOICE_FIELDS, const unsigned char *head, const float4 *params, const float *scores,
            const float *floors, const f16 *split, const float *scales, const f16 *weight, Candidate *best,
            unsigned *arrivals, int *out, int rows) {
    extern __shared__ __align__(16) f16 tiles[];  // [8 rows of x][high, low][PITCH]
    __shared__ int listed[EACH * THREADS], found;
    __shared__ Choice choice[8];
    __shared__ float4 p[8];
    __shared__ float floor[8];
    __shared__ bool last;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int begin = blockIdx.x * EACH * THREADS + threadIdx.x, first = blockIdx.y * 8;
    if (threadIdx.x == 0) found = 0;
    wait_for_before();
    start_dependents();
    int all = STEP_ROWS(step), count = min(all - first, 8);
    scales += first, best += first;
    split += (size_t)first * 2 * COLS, scores += (size_t)first * rows;

    float2 size[TOGETHER];
    float score[TOGETHER][MANY];
    auto fetch = [&](int i) {  // of this thread's rows of the head, from the i-th on
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            int n = min(begin + (i + j) * THREADS, rows - 1);
            size[j] = ((const float2 *)(head + head_sizes_at(rows)))[n];
#pragma unroll
            for (int r = 0; r < MANY; r++) score[j][r] = r < count ? scores[(size_t)r * rows + n] : 0.0f;
        }
    };
    auto stage_x = [&](int from_k) {
        for (int i = threadIdx.x; i < 16 * (STAGE / 8); i += THREADS) {
            int row = i / (STAGE / 8), at = from_k + i % (STAGE / 8) * 8;
            bool there = at < COLS && row / 2 < count;
            copy_async(tiles + row * PITCH + at - from_k, split + (there ? (size_t)row * COLS + at : 0), there);
        }
    };
    fetch(0);
    if (count > 0) stage_x(0);  // else the block's rows are past the last, and were never written
    if ((int)threadIdx.x < count) {  // signed: the count of a block that is past the last row is below zero
        int r = first + threadIdx.x;
        choice[threadIdx.x] = head_choice(step, CHOICE_AT, r, rows), p[threadIdx.x] = params[r], floor[threadIdx.x] = floors[r];
    }
    __syncthreads();
    for (int i = 0; i < EACH && count > 0; i += TOGETHER) {
        bool in[TOGETHER] = {};
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
#pragma unroll
            for (int r = 0; r < MANY; r++) {
                if (r >= count) break;
                float key = head_key(choice[r], score[j][r] + head_doubt(PLANES, p[r], size[j]), begin + (i + j) * THREADS);
                in[j] |= !(key < floor[r]);  // a NaN stays in
            }
        }
        if (i + TOGETHER < EACH) fetch(i + TOGETHER);
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            int n = begin + (i + j) * THREADS;
            if (in[j] && i + j < EACH && n < rows) listed[atomicAdd(&found, 1)] = n;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < min(found, AHEAD) * (COLS / 64); i += THREADS) {  // a line each
        const f16 *line = weight + (size_t)listed[i / (COLS / 64)] * COLS + i % (COLS / 64) * 64;
        asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
    }
    for (int base = 0; base < found; base += 16 * WARPS) {
        int mine = base + warp * 16;
        const uint4 *upper = (const uint4 *)(weight + (size_t)listed[min(mine + group, found - 1)] * COLS) + quarter;
        const uint4 *lower = (const uint4 *)(weight + (size_t)listed[min(mine + group + 8, found - 1)] * COLS) + quarter;
        DenseSums<SUMS> sums = {};
        for (int from_k = 0; from_k < COLS; from_k += STAGE) {
            if (STAGE < COLS && base + from_k > 0) {
                __syncthreads();
                stage_x(from_k);
            }
            asm volatile("cp.async.wait_all;");
            __syncthreads();
            if (mine >= found) continue;
            uint4 next[2][DEPTH];
            auto fetch_rows = [&](int k) {
#pragma unroll
                for (int i = 0; i < DEPTH; i++) next[0][i] = stream(upper + k / 8 + i * 4), next[1][i] = stream(lower + k / 8 + i * 4);
            };
            int end = min(COLS, from_k + STAGE);  // a multiple of 32 * DEPTH, as COLS and STAGE are
            fetch_rows(from_k);
            for (int k = from_k; k < end; k += 32 * DEPTH) {
                uint4 now[2][DEPTH];
#pragma unroll
                for (int i = 0; i < 2 * DEPTH; i++) now[i / DEPTH][i % DEPTH] = next[i / DEPTH][i % DEPTH];
                if (k + 32 * DEPTH < end) fetch_rows(k + 32 * DEPTH);
                const f16 *x = tiles + group * 2 * PITCH + k - from_k + quarter * 8;
#pragma unroll
                for (int i = 0; i < DEPTH; i++) {
#pragma unroll
                    for (int low = 0; low < 2; low++) sums.add(now[0][i], now[1][i], *(const uint4 *)(x + low * PITCH + 32 * i), low);
                }
            }
        }
        if (mine >= found) continue;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int r = quarter * 2 + i;
            Candidate reached = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int at = mine + group + h * 8;
                if (at >= found || r >= count) continue;
                reached = max(reached, candidate(head_key(choice[r], sums.of(2 * h + i) * (1.0f / scales[r]), listed[at]), listed[at]));
            }
            reached = best_of_groups(reached);
            if (group == 0 && r < count) atomicMax(best + r, reached);
        }
    }
    __threadfence();
    __syncthreads();
    unsigned blocks = gridDim.x * gridDim.y;
    if (threadIdx.x == 0) last = atomicInc(arrivals, blocks - 1) == blocks - 1;
    __syncthreads();
    if (!last || threadIdx.x >= all) return;
    out[threadIdx.x] = winner(*(volatile Candidate *)(best - first + threadIdx.x));
}
