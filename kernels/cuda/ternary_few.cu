// ternary_matmul for some 3 to 64 tokens, on the tensor cores: more than ternary_decode takes, and too few to fill the tiles of other kernels.
//
// A warp multiplies a tile of 16 rows of W with TOKENS tokens by mma.m16n8k32, over all of K in its order, and then takes another tile.
// Codes come through a ring in shared memory that each warp has for itself, 256 columns at a time, and are on their way before
// the kernel waits for its predecessor. The block's tokens are in shared memory as a whole; blocks of other tokens read the same codes.
//
// A block of 128 columns is 32 bytes of codes. A thread takes the words 2q and 2q + 1 of a row, one bit pair after the other (eight
// neighbours of K each), so a product of K = 32 is one bit pair of all eight words.
// KSPLIT warps share a tile: each takes every KSPLIT-th step, and finishes a share of the results.
// GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
// GROUP: columns of K that share a scale of a row (64, 128 or 256); 0: one scale for all. Codes are then two's complement, and the products
// of each group are added, times its scale, to f32 sums, in their order.
// ORDERED: x is in the order in which threads need it, from transform_quant: for each 256 columns, uint4 [2 blocks][2 halves][lane] of two
// bit pairs each. Threads load it where they multiply, so that nobody waits for all of x. For 8 tokens at most, and whole steps.
// PAIR: as in pair.cuh.
#include "pair.cuh"
#define NT (TOKENS / 8)
#define THREADS (WARPS * WARP)
#define SLOTS (WARPS / KSPLIT) /* tiles that a block processes at a time */
#define STEPS ((ROW_BYTES + 63) / 64)
#define MINE ((STEPS + KSPLIT - 1) / KSPLIT) /* steps of a warp; the last may be past K */
#define EVEN (ROW_BYTES % (64 * KSPLIT) == 0)
#define X_BYTES (MINE * KSPLIT * 256)
#define X_PITCH (X_BYTES + 32) /* so that four neighbours fall into different banks */
#define CODES 1024             /* bytes of a step of 16 rows */
#define RESULTS (4 * NT)       /* of a thread's tile: number u is of token u / 4 * 8 + 2 quarter + u / 2 % 2, and row low or high */
#define SHARE (RESULTS / KSPLIT)
#if GROUP
#define A_TYPE "s8"
#define SUMS (256 / GROUP) /* of a step: one for each group */
#define SUM_OF(block, plane) (((block) * 128 + (plane) * 32) / GROUP)
#define COUNT (COLS / GROUP)
#if GROUP == 64
typedef uint2 Units; /* the scales of a row and step */
#else
typedef unsigned Units; /* with that of a neighbouring step, where there is one a step */
#endif
#define SCALES (16 * (int)sizeof(Units)) /* bytes of a step's scales */
#else
#define A_TYPE "u8"
#define SUMS 4 /* of all steps: one for each bit pair */
#define SUM_OF(block, plane) (plane)
#define SCALES 0
#endif
#define STAGE (CODES + SCALES)
#define PASSED (GROUP ? 2 * SUMS : 1) /* sets of results that a warp has in shared memory for the others: of groups, of two steps in turn */
#define MAGIC 0x4B400000 /* as a float, 3 * 2^22: the bits of MAGIC + n are those of the float 3 * 2^22 + n */

__device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[4], uint2 b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." A_TYPE ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// One bit pair of every byte. Of groups: moved to the byte's top, where it is 64 times the weight.
__device__ __forceinline__ unsigned pairs_at(unsigned word, int plane) {
#if GROUP
    return word << 2 * plane & 0xC0C0C0C0u;
#else
    return word & 0x03030303u << (6 - 2 * plane);
#endif
}

// What a thread needs for a step of 256 columns, two blocks of 128.
struct Operands {
    uint2 words[2][2], x[2][4][NT];  // of each block: of rows low and high, and of the tokens at each bit pair
#if GROUP
    Units units[2];  // of rows low and high
#endif
};

__device__ __forceinline__ void copy_codes(unsigned to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}
#if GROUP
__device__ __forceinline__ void copy_scales(unsigned to, const unsigned char *from) {
    if (GROUP == 256) from -= (size_t)from & 2;  // to the word that has the scale; the last word is whole, as TernaryBuffer says
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(sizeof(Units)));
}
#endif

// The warps that share a tile meet.
__device__ __forceinline__ void meet(int slot) { asm volatile("bar.sync %0, %1;" ::"r"(slot + 1), "n"(KSPLIT * WARP) : "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS)
ternary_few(const int *step, const signed char *x, const float *scale, const int *sums, const unsigned char *codes, const void *w_scale,
            float *out, int rows PAIR_ARGS(unsigned char *, void)) {
    extern __shared__ __align__(128) unsigned char memory[];  // [WARPS][DEPTH][STAGE], [TOKENS][X_PITCH]
    [[maybe_unused]] signed char *x_shared = (signed char *)memory + WARPS * DEPTH * STAGE;
#if KSPLIT > 1
    auto passed = (float(*)[KSPLIT][PASSED][RESULTS][WARP])(x_shared + (ORDERED ? 0 : TOKENS * X_PITCH));  // [SLOTS]
#endif
    __builtin_assume(threadIdx.x < THREADS);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int slot = warp / KSPLIT, part = warp % KSPLIT, all = (rows + 15) / 16, stride = gridDim.x * SLOTS, m0 = blockIdx.y * TOKENS;
#if PAIR
    int first_tiles = all;
    all += (rows2 + 15) / 16;
#endif
    auto tile_of = [&](int tile) { return OF(tile, tile, tile - first_tiles); };  // in its own matrix
    int tile = blockIdx.x + gridDim.x * slot;
    unsigned char *ring = memory + warp * DEPTH * STAGE;

    // Copies of steps: the next one is this warp's step `at` of tile `ahead`, and goes to `next` in shared memory.
    int at = 0, ahead = tile;
    const unsigned char *low_from, *high_from;
    [[maybe_unused]] const unsigned char *scales_from;
    auto row_of = [&](int tile, int r) { return min(GLU ? tile * 8 + r % 8 + (r < 8 ? 0 : rows / 2) : tile_of(tile) * 16 + r, OF(tile, rows, rows2) - 1); };
    auto begin = [&] {
        low_from = OF(ahead, codes, codes2) + (size_t)row_of(ahead, group) * ROW_BYTES + part * 64 + quarter * 16;
        high_from = OF(ahead, codes, codes2) + (size_t)row_of(ahead, group + 8) * ROW_BYTES + part * 64 + quarter * 16;
#if GROUP
        scales_from = (const unsigned char *)OF(ahead, w_scale, w_scale2) + (size_t)row_of(ahead, lane % 16) * (COUNT * 2) + part * (SUMS * 2);
#endif
    };
    // Rows exchange their halves by their number, so that those of a warp fall into all banks.
    unsigned code_to = shared_at(ring) + group * 64 + ((quarter / 2 ^ group / 2 % 2) * 2 + quarter % 2) * 16, next = 0;
    [[maybe_unused]] unsigned scale_to = shared_at(ring) + CODES + lane * (SCALES / 16);
    auto fetch = [&] {
        if (ahead < all) {
            bool there = EVEN || (at * KSPLIT + part) * 64 + quarter * 16 < ROW_BYTES;
            copy_codes(code_to + next, there ? low_from : codes, there);
            copy_codes(code_to + next + 512, there ? high_from : codes, there);
            low_from += KSPLIT * 64, high_from += KSPLIT * 64;
#if GROUP
            if (lane < 16) copy_scales(scale_to + next, scales_from);
            scales_from += KSPLIT * SUMS * 2;
#endif
            next = next + STAGE == DEPTH * STAGE ? 0 : next + STAGE;
            if (++at == MINE) at = 0, ahead += stride, begin();
        }
        copies_commit();
    };
    begin();
#pragma unroll 1
    for (int i = 0; i < DEPTH; i++) fetch();
    start_dependents();
    wait_for_before();
    int tokens = min(STEP_TOKENS(step) - m0, TOKENS);
    if (tokens <= 0) return;

#if !ORDERED
    // Zeros past the step's tokens: blocks that all repeat one row would wait for its part of the second-level cache.
    for (int i = threadIdx.x; i < TOKENS * (X_BYTES / 16); i += THREADS) {
        int m = i / (X_BYTES / 16), k = i % (X_BYTES / 16) * 16;
        bool there = m < tokens && (COLS == X_BYTES || k < COLS);
        copy_async(x_shared + m * X_PITCH + k, x + (there ? (size_t)(m0 + m) * COLS + k : 0), there);
    }
    copies_commit();
#endif
    auto token_of = [&](int i) {  // of this warp's result number i
        int u = part * SHARE + i;
        return u / 4 * 8 + quarter * 2 + u / 2 % 2;
    };
    float x_scale[SHARE];
    [[maybe_unused]] int x_sum[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        int m = m0 + min(token_of(i), tokens - 1);
#if GROUP
        x_scale[i] = scale[m] * (1.0f / 64);
#else
        x_scale[i] = scale[m], x_sum[i] = sums[m];
#endif
    }
#if PAIR
    ConvEntries entries[SHARE];
#pragma unroll
    for (int i = 0; i < SHARE; i++) entries[i] = entries_of(m0 + min(token_of(i), tokens - 1), step, token_seq, state_from, state_to);
#endif
#if ORDERED
    const uint4 *x_at = (const uint4 *)x + part * 128 + lane;
#else
    copies_wait<0>();
    __syncthreads();

    const signed char *x_at = x_shared + group * X_PITCH + quarter * 8 + part * 256;
#endif
    unsigned code_at = group * 64 + (group / 2 % 2) * 32 + quarter * 8;
    int now = 0;
#if GROUP == 256
    unsigned first_scale[2];  // numbers of this warp's first scales of rows low and high
#endif
    auto load = [&](Operands &o, int s) {
#if ORDERED
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 two = x_at[s * (KSPLIT * 128) + i * WARP];
            o.x[i / 2][i % 2 * 2][0] = make_uint2(two.x, two.y), o.x[i / 2][i % 2 * 2 + 1][0] = make_uint2(two.z, two.w);
        }
#endif
        copies_wait<DEPTH - 2>();
        __syncwarp();
        const unsigned char *stage = ring + now;
        now = now + STAGE == DEPTH * STAGE ? 0 : now + STAGE;
#pragma unroll
        for (int i = 0; i < 4; i++) o.words[i / 2][i % 2] = *(const uint2 *)(stage + (code_at ^ i / 2 * 32) + i % 2 * 512);
#if !ORDERED
#pragma unroll
        for (int i = 0; i < 8 * NT; i++) {
            int b = i / (4 * NT), plane = i / NT % 4, n = i % NT;
            o.x[b][plane][n] = *(const uint2 *)(x_at + s * (KSPLIT * 256) + n * 8 * X_PITCH + b * 128 + plane * 32);
        }
#endif
#if GROUP
        o.units[0] = *(const Units *)(stage + CODES + group * (SCALES / 16));
        o.units[1] = *(const Units *)(stage + CODES + (group + 8) * (SCALES / 16));
#if GROUP == 256
        o.units[0] >>= (first_scale[0] + s * KSPLIT) % 2 * 16, o.units[1] >>= (first_scale[1] + s * KSPLIT) % 2 * 16;
#endif
#endif
    };
    for (; tile < all; tile += stride) {
        int row[2] = {row_of(tile, group), row_of(tile, group + 8)};
        bool there[2] = {GLU ? tile * 8 + group < rows / 2 : row[0] == tile_of(tile) * 16 + group, !GLU && row[1] == tile_of(tile) * 16 + group + 8};
#if ADD
        float old[SHARE];
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            int half = (part * SHARE + i) % 2;
            old[i] = out[(size_t)(m0 + min(token_of(i), tokens - 1)) * rows + (half ? row[1] : row[0])];
        }
#elif PAIR
        ConvColumn columns[SHARE];
#pragma unroll
        for (int i = 0; i < SHARE; i++) COLUMN(columns[i], tile, entries[i], (part * SHARE + i) % 2 ? row[1] : row[0]);
#endif
#if GROUP
        float total[SHARE] = {};
#if GROUP == 256
        first_scale[0] = row[0] * COUNT + part, first_scale[1] = row[1] * COUNT + part;
#endif
#else
        float unit[2] = {to_float(((const unit_t *)w_scale)[row[0]]), to_float(((const unit_t *)w_scale)[row[1]])};
        int kept[SUMS][NT][4] = {};
#endif
        Operands of[2];
        load(of[0], 0);
#pragma unroll 2
        for (int s = 0; s < MINE; s++) {
            if (s + 1 < MINE) load(of[(s + 1) % 2], s + 1);
            const Operands &o = of[s % 2];
#if GROUP
            int kept[SUMS][NT][4];
#pragma unroll
            for (int i = 0; i < SUMS * NT * 4; i++) kept[i / (NT * 4)][i / 4 % NT][i % 4] = MAGIC;
#endif
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const int sum = SUM_OF(b, plane);
                    uint2 low = o.words[b][0], high = o.words[b][1];
                    unsigned a[4] = {pairs_at(low.x, plane), pairs_at(high.x, plane), pairs_at(low.y, plane), pairs_at(high.y, plane)};
#pragma unroll
                    for (int n = 0; n < NT; n++) mma(kept[sum][n], a, o.x[b][plane][n]);
                }
            }
#if GROUP
#pragma unroll
            for (int g = 0; g < SUMS; g++) {
#pragma unroll
                for (int u = 0; u < RESULTS; u++) {
                    float sum = __fsub_rn(__int_as_float(kept[g][u / 4][u % 2 * 2 + u / 2 % 2]), __int_as_float(MAGIC));
                    float term = __fmul_rn(sum, to_float(((const f16 *)&o.units[u % 2])[g]));
#if KSPLIT > 1
                    passed[slot][part][s % 2 * SUMS + g][u][lane] = term;
#else
                    total[u] = __fadd_rn(total[u], term);
#endif
                }
            }
#endif
            __syncwarp();
            fetch();
#if GROUP && KSPLIT > 1
            meet(slot);
#pragma unroll
            for (int i = 0; i < KSPLIT * SUMS * SHARE; i++) {
                int p = i / (SUMS * SHARE), g = i / SHARE % SUMS;
                total[i % SHARE] = __fadd_rn(total[i % SHARE], passed[slot][p][s % 2 * SUMS + g][part * SHARE + i % SHARE][lane]);
            }
#endif
        }
#if !GROUP
        int total[SHARE];
#pragma unroll
        for (int u = 0; u < RESULTS; u++) {
            int n = u / 4, j = u % 2 * 2 + u / 2 % 2, sum = kept[3][n][j] + (kept[2][n][j] >> 2) + (kept[1][n][j] >> 4) + (kept[0][n][j] >> 6);
#if KSPLIT > 1
            passed[slot][part][0][u][lane] = __int_as_float(sum);
#else
            total[u] = sum;
#endif
        }
#if KSPLIT > 1
        meet(slot);
#pragma unroll
        for (int i = 0; i < SHARE; i++) {
            total[i] = 0;
#pragma unroll
            for (int p = 0; p < KSPLIT; p++) total[i] += __float_as_int(passed[slot][p][0][part * SHARE + i][lane]);
        }
        meet(slot);
#endif
#endif
        auto value = [&](int i, int half) {
#if GROUP
            return __fmul_rn(total[i], x_scale[i]);
#else
            return dequantize(total[i] - x_sum[i], x_scale[i], half ? unit[1] : unit[0]);
#endif
        };
#pragma unroll
        for (int i = 0; i < SHARE; i += 1 + GLU) {  // a gate with its up
            int m = token_of(i), half = (part * SHARE + i) % 2;
            if (m >= tokens || !(half ? there[1] : there[0])) continue;
            [[maybe_unused]] float *to = out + (size_t)(m0 + m) * (GLU ? rows / 2 : rows) + (half ? row[1] : row[0]);
#if GLU
            *to = act(value(i, 0)) * value(i + 1, 1);
#elif ADD  // the contract rounds this sum separately
            *to = __fadd_rn(old[i], value(i, half));
#elif PAIR
            PUT(columns[i], tile, m0 + m, half ? row[1] : row[0], value(i, half));
#else
            *to = value(i, half);
#endif
        }
    }
}
