// Scores of all rows of a compact head, roughly, for up to 64 rows of x, and for each of these the likeliest row of the head: that
// of the greatest key once the error of its weights is taken off. A warp has 16 rows of the head at a time; it asks for the next
// ITERS * 64 bytes of each while it multiplies the last ones, on the tensor cores: u4 codes expanded to bytes, and for each
// row of x PLANES columns of bytes side by side: its high and its low ones, or one. Of columns there are TILES times 8.
//
// WGMMA: of many rows, on Hopper's asynchronous tensor cores. Four warps have 64 rows of the head together; `columns` are in the 128-byte
// swizzle, 128 bytes of each at a time, in the order that head_rows gives them.
#include "head.cuh"
#define STAGES (COLS / 128 / ITERS)
#if WGMMA
#define NT TILES
#define A_TYPE "u8"
#include "columns.cuh"
#endif
#define PITCH (COLS + 16) /* so that two columns fall into different banks */
#define SLAB (TILES * 8 * 128) /* bytes of 128 of all columns, where they are swizzled */
#define EACH (2 / PLANES) /* rows of x of a thread, in a tile */
#define TURN_BITS 8 /* of a mark: which of the warp's tiles, and which half of its rows; the others are those of a key */
#define UNROLLED (TILES > 2 && STAGES % 2 == 0 ? 2 : STAGES) /* with many tiles all stages are more code than the instruction cache holds */

#if !WGMMA
__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#endif

extern "C" __global__ void __launch_bounds__(WARPS * WARP, BLOCKS)
head_score(const int *step, CHOICE_FIELDS, const unsigned char *head, const signed char *planes, const float4 *params,
           float *scores, Candidate *likeliest,
#if FILTERED
           unsigned *peaks,  // keys of the greatest u (filter.cuh) for each row of x
#endif
           int rows) {
#if WGMMA
    extern __shared__ signed char unaligned[];  // [COLS / 128][SLAB], and 1024 bytes to align it
    signed char *columns = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024;
#else
    extern __shared__ __align__(16) signed char columns[];  // [TILES * 8][PITCH]
#endif
    __shared__ float4 p[TOKENS];
    __shared__ Choice choice[TOKENS];
    __shared__ Candidate best[TOKENS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    const float2 *sizes = (const float2 *)(head + head_sizes_at(rows));
    int tile = blockIdx.x * WARPS + warp, tiles = (rows + 15) / 16;
    uint4 codes[2][2][ITERS];  // of the rows group and group + 8
    auto fetch = [&](int to, int t, int stage) {
        const uint4 *from = (const uint4 *)head + stage * ITERS * 4 + quarter;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 *row = from + (size_t)min(t * 16 + group + 8 * h, rows - 1) * (COLS / 32);
#pragma unroll
            for (int i = 0; i < ITERS; i++) codes[to][h][i] = stream(row + i * 4);
        }
    };
    if (tile < tiles) fetch(0, tile, 0);
    start_dependents();
    wait_for_before();
    int count = STEP_ROWS(step);
    for (int i = threadIdx.x; i < TILES * 8 * (COLS / 16); i += WARPS * WARP) {
        int c = i / (COLS / 16), at = i % (COLS / 16) * 16;
#if WGMMA
        int to = at / 128 * SLAB + c * 128 + (at / 16 ^ c) % 8 * 16;
#else
        int to = c * PITCH + at;
#endif
        copy_async(columns + to, planes + (c < PLANES * count ? (size_t)c * COLS + at : 0), c < PLANES * count);
    }
    if (threadIdx.x < count) {
        p[threadIdx.x] = params[threadIdx.x];
        choice[threadIdx.x] = head_choice(step, CHOICE_AT, threadIdx.x, rows);
        best[threadIdx.x] = 0;
    }
    unsigned marks[TILES * EACH] = {};  // the likeliest of this thread's rows of the head, for each of its rows of x
#if FILTERED
    __shared__ unsigned peak[TOKENS];
    unsigned greatest[TILES * EACH] = {};
    if (threadIdx.x < TOKENS) peak[threadIdx.x] = 0;
#endif
    int first = tile, turn = 0;
    asm volatile("cp.async.wait_all;" ::: "memory");
#if WGMMA
    before_sending();
#endif
    __syncthreads();
    for (; (WGMMA ? tile / 4 * 4 : tile) < tiles; tile += gridDim.x * WARPS, turn++) {
        int sums[TILES][4] = {};
#pragma unroll UNROLLED
        for (int stage = 0; stage < STAGES; stage++) {
            int next = tile + gridDim.x * WARPS, now = stage % 2;
            if (stage + 1 < STAGES) fetch(1 - now, tile, stage + 1);
            else if (next < tiles) fetch(1 - now, next, 0);
#pragma unroll
            for (int i = 0; i < ITERS; i++) {
                uint4 a = codes[now][0][i], b = codes[now][1][i];
#if WGMMA
                products_wait<0>();  // of the columns before
                unsigned low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w}, w[4][4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    w[j][0] = low[j] & 0x0F0F0F0Fu, w[j][1] = high[j] & 0x0F0F0F0Fu;
                    w[j][2] = low[j] >> 4 & 0x0F0F0F0Fu, w[j][3] = high[j] >> 4 & 0x0F0F0F0Fu;
                }
                expanded(w);
                unsigned long long x = operand(columns + (stage * ITERS + i) * SLAB);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(sums, w[j], x + 2 * j);
                products_commit();
#else
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned shift = 4 * half, mask = 0x0F0F0F0Fu;
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        const signed char *from = columns + (t * 8 + group) * PITCH + ((stage * ITERS + i) * 4 + quarter) * 32 + half * 16;
                        uint4 x = *(const uint4 *)from;
                        mma(sums[t], a.x >> shift & mask, b.x >> shift & mask, a.y >> shift & mask, b.y >> shift & mask, x.x, x.y);
                        mma(sums[t], a.z >> shift & mask, b.z >> shift & mask, a.w >> shift & mask, b.w >> shift & mask, x.z, x.w);
                    }
                }
#endif
            }
        }
#if WGMMA
        products_end(sums);
#endif
        if (STAGES % 2) {  // the next tile's first codes are in the other half
#pragma unroll
            for (int i = 0; i < 2 * ITERS; i++) codes[0][i / ITERS][i % ITERS] = codes[1][i / ITERS][i % ITERS];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int n = tile * 16 + group + 8 * h;
            if (n >= rows) break;
            float2 size = sizes[n];
            unsigned mark = turn << 1 | h;
#pragma unroll
            for (int i = 0; i < TILES * EACH; i++) {
                int t = i / EACH, r = t * 4 * EACH + quarter * EACH + i % EACH;
                if (r >= count) continue;
                const int *of = sums[t] + h * 2;
                // The high bytes count 256-fold: below 2^31 for up to 4,096 columns.
                float sum = (float)(PLANES == 2 ? of[0] * 256 + of[1] : of[i % EACH]) - p[r].y;
                float score = sum * p[r].x * size.x;
                scores[(size_t)r * rows + n] = score;
                float key = head_key(choice[r], score - p[r].z * size.x, n);
                if (key == key && mark >> TURN_BITS == 0) marks[i] = max(marks[i], float_key(key) >> TURN_BITS << TURN_BITS | mark);
#if FILTERED
                if (choice[r].filter.on) greatest[i] = max(greatest[i], float_key(head_size(PLANES, choice[r], p[r], size, score, n)));
#endif
            }
        }
    }
#pragma unroll
    for (int i = 0; i < TILES * EACH; i++) {
        int r = i / EACH * 4 * EACH + quarter * EACH + i % EACH;
        unsigned mark = marks[i] % (1 << TURN_BITS), key = marks[i] >> TURN_BITS << TURN_BITS;
        unsigned n = (first + (mark >> 1) * gridDim.x * WARPS) * 16 + group + mark % 2 * 8;
        Candidate reached = best_of_groups(key ? (Candidate)key << 32 | (FULL - n) : 0);
        if (group == 0 && r < count) atomicMax(best + r, reached);
#if FILTERED
        if (r < count) atomicMax(peak + r, greatest[i]);
#endif
    }
    __syncthreads();
    if (threadIdx.x < count) atomicMax(likeliest + threadIdx.x, best[threadIdx.x]);
#if FILTERED
    if (threadIdx.x < count) atomicMax(peaks + threadIdx.x, peak[threadIdx.x]);
#endif
}
