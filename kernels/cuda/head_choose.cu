// Chooses the token of each of up to 64 rows: scores, with the full weights, every row of the head that could still win
// by its rough score, 16 at a time, exactly as dense_mma does (the same products in the same order), and takes the
// greatest. A block looks at EACH * THREADS rows of the head for 8 of the rows; the one that finishes last stores the
// tokens.
//
// FILTERED: also scores the rows of the head that are taken (filter.cuh), and lists their z and probability for each row of x. The
// random numbers are the same for all 8 rows of x, so that most rows taken for one are taken for the others. `bars` is the greatest
// possible z of the rows that were not certain to be taken. Exact scores replace the rough ones.
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
#if FILTERED
#define SCORES float *
#else
#define SCORES const float *
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
head_choose(const int *step, CHOICE_FIELDS, const unsigned char *head, const float4 *params, SCORES scores,
            const float *floors, const f16 *split, const float *scales, const f16 *weight, Candidate *best,
            unsigned *arrivals,
#if FILTERED
            const float *log_rates, unsigned *bars, int *counts, float2 *lists,
#endif
            int *out, int rows) {
    extern __shared__ __align__(16) f16 tiles[];  // [8 rows of x][high, low][PITCH]
    __shared__ int listed[EACH * THREADS], found;
    __shared__ Choice choice[8];
    __shared__ float4 p[8];
    __shared__ float floor[8];
    __shared__ bool last;
#if FILTERED
    __shared__ unsigned char taken_for[EACH * THREADS];  // a bit for each row of x
    __shared__ float log_rate[8];
    __shared__ unsigned bar[8], seed_lo, seed_hi, position;
    __shared__ int taken[8], place[8];
    unsigned highest[MANY] = {};
    if (threadIdx.x < 8) bar[threadIdx.x] = 0, taken[threadIdx.x] = 0;
#endif
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int begin = blockIdx.x * EACH * THREADS + threadIdx.x, first = blockIdx.y * 8;
    if (threadIdx.x == 0) found = 0;
    wait_for_before();
    start_dependents();
    int all = STEP_ROWS(step), count = min(all - first, 8);
    scales += first, best += first;
    split += (size_t)first * 2 * COLS, scores += (size_t)first * rows;
#if FILTERED
    bars += first, counts += first, lists += (size_t)first * CAPACITY;
#endif

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
#if FILTERED
    auto chance_for = [&](int r, int n, float rough, float2 size) {
        return chance_of(head_size(PLANES, choice[r], p[r], size, rough, n), log_rate[r]);
    };
#endif
    fetch(0);
    if (count > 0) stage_x(0);  // else the block's rows are past the last, and were never written
    if ((int)threadIdx.x < count) {  // signed: the count of a block that is past the last row is below zero
        int r = first + threadIdx.x;
        choice[threadIdx.x] = head_choice(step, CHOICE_AT, r, rows), p[threadIdx.x] = params[r], floor[threadIdx.x] = floors[r];
#if FILTERED
        bool &on = choice[threadIdx.x].filter.on;
        log_rate[threadIdx.x] = on ? log_rates[r] : 0.0f;  // head_floor finds no rate for a row without filters
        on = on && fabsf(log_rate[threadIdx.x]) < INFINITY_F;
        if (threadIdx.x == 0) {
            seed_lo = step[seeds_lo + first], seed_hi = step[seeds_hi + first];
            position = token_position(step, token_seq, seq_begin, seq_len, step[rows_at + first]) + 1;
        }
#endif
    }
    __syncthreads();
    for (int i = 0; i < EACH && count > 0; i += TOGETHER) {
        bool in[TOGETHER] = {};
#if FILTERED
        unsigned takings[TOGETHER];
#endif
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
#if FILTERED
            int n = begin + (i + j) * THREADS;
            unsigned word = lane_of(noise_words(seed_lo, seed_hi, n, position, 1), n), taking = 0;
            bool there = i + j < EACH && n < rows;
#endif
#pragma unroll
            for (int r = 0; r < MANY; r++) {
                if (r >= count) break;
#if FILTERED
                if (there && choice[r].filter.on) {
                    float chance = chance_for(r, n, score[j][r], size[j]);
                    float high = head_high(PLANES, choice[r], p[r], size[j], score[j][r], n);
                    if (chance < 1.0f) highest[r] = max(highest[r], float_key(no_number(high) ? INFINITY_F : high));
                    if (takes(chance, word)) taking |= 1 << r, atomicAdd(taken + r, 1);
                }
#endif
                float key = head_key(choice[r], score[j][r] + head_doubt(PLANES, p[r], size[j]), begin + (i + j) * THREADS);
                in[j] |= !(key < floor[r]);  // a NaN stays in
            }
#if FILTERED
            in[j] |= taking != 0;
            takings[j] = taking;
#endif
        }
        if (i + TOGETHER < EACH) fetch(i + TOGETHER);
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            int n = begin + (i + j) * THREADS;
            if (in[j] && i + j < EACH && n < rows) {
                int at = atomicAdd(&found, 1);
                listed[at] = n;
#if FILTERED
                taken_for[at] = takings[j];
#endif
            }
        }
    }
#if FILTERED
#pragma unroll
    for (int r = 0; r < MANY; r++) {
        unsigned most = __reduce_max_sync(FULL, highest[r]);
        if (lane == 0 && r < count) atomicMax(bar + r, most);
    }
#endif
    __syncthreads();
#if FILTERED
    if ((int)threadIdx.x < count) {
        atomicMax(bars + threadIdx.x, bar[threadIdx.x]);
        place[threadIdx.x] = taken[threadIdx.x] ? atomicAdd(counts + threadIdx.x, taken[threadIdx.x]) : 0;
    }
#endif
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
                float logit = sums.of(2 * h + i) * (1.0f / scales[r]);
                reached = max(reached, candidate(head_key(choice[r], logit, listed[at]), listed[at]));
#if FILTERED
                int n = listed[at];
                float *score = scores + (size_t)r * rows + n;
                if (taken_for[at] >> r & 1) {
                    float chance = chance_for(r, n, *score, ((const float2 *)(head + head_sizes_at(rows)))[n]);
                    int to = atomicAdd(place + r, 1);
                    if (to < CAPACITY) lists[(size_t)r * CAPACITY + to] = make_float2(head_z(choice[r], logit, n), chance);
                }
                *score = logit;
#endif
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
