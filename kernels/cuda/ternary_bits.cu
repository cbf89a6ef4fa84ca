// ternary_matmul of one token and weights with a scale for each 128 columns, by products of bits on the tensor cores, fused with the
// operations before and after it where possible.
//
// A code is two's complement: its weight is low - 2 high, where low and high are its bits. An activation's int8 has eight bits, with
// weights of 1, 2, 4, … and -128. So a sum of products is a sum of counts of bits that are set in both, and mma.m16n8k256 counts
// those of 16 rows and all eight bits of an activation at once, without taking codes apart: codes are one operand as they lie in
// memory, and the other has the activations' bits where codes have their low bits, or one place higher.
//
// A warp's step is 512 columns (four groups) of a tile of 16 rows; KSPLIT warps share a tile's K. A block takes tile after tile. The codes
// and scales of a warp's first DEPTH tiles are on their way to shared memory before the kernel waits for its predecessor, and those
// of later ones as places become free. The terms of all groups lie in shared memory, too, where one thread a row adds them in their order.
//
// The arguments are those of ternary_decode. INPUT 0: x is int8 with a scale. 1: x is f32: absmax int8 here, in each block. 2: the same after RMSNorm.
// 3: x is bits of int8, from transform_quant: of each group 32 words, in which a lane has those of the 16 columns that it counts.
// PAIR: as in pair.cuh. GLU: rows 0..rows/2-1 of W are gates, the others their ups: a tile is 8 of each and out = act(gate) * up.
#include "hopper.cuh"
#include "pair.cuh"
#define STEPS (COLS / 512)
#define ITERS ((STEPS + KSPLIT - 1) / KSPLIT)
#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define GROUPS (COLS / 128)
#define PITCH (GROUPS | 1) /* of a row's terms, odd so that neighbours fall into different banks */
#define UNITS (COLS / 16) /* sets of 16 columns whose codes share a word */
#define EACH ((UNITS + THREADS - 1) / THREADS)
#define GROUP_WORDS 72 /* of bits of a group, 8 of each of 8 bits; more, so that neighbours fall into different banks */
#define CODES 2048 /* bytes of a step of 16 rows */
#define SCALES 128 /* bytes of their scales */
#define WHOLE (STEPS % KSPLIT == 0) /* all warps have as many steps */

// Adds to c counts of bits that are set in both: of rows `low` (a[0] and a[2]) and `high` (a[1] and a[3]), and columns b.
__device__ __forceinline__ void count(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void copy_scales(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}

extern "C" __global__ void __launch_bounds__(THREADS)
ternary_bits(const int *step, const void *input, const float *scale, const int *input_sums, const float *norm, float eps,
             const __grid_constant__ TensorMap codes, const unsigned short *w_scale, float *out, int rows
             PAIR_ARGS(__grid_constant__ TensorMap, unsigned short)) {
    extern __shared__ unsigned char unaligned[];                                       // 1024 bytes to align what follows
    unsigned char *ring = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024;     // [WARPS][DEPTH][ITERS][CODES]
    unsigned char *scale_ring = ring + WARPS * DEPTH * ITERS * CODES;                  // [WARPS][DEPTH][ITERS][SCALES]
#if INPUT == 3
    float *terms = (float *)(scale_ring + WARPS * DEPTH * ITERS * SCALES);             // [2][TILES * 16][PITCH]
#else
    unsigned *bits = (unsigned *)(scale_ring + WARPS * DEPTH * ITERS * SCALES);        // [GROUPS][GROUP_WORDS]: [8 bits][8 words]
    float *terms = (float *)(bits + GROUPS * GROUP_WORDS);
#endif
    __shared__ Barrier full[WARPS * DEPTH];
    __builtin_assume(threadIdx.x < THREADS);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int begin = warp % KSPLIT * ITERS, steps = WHOLE ? ITERS : max(0, min(ITERS, STEPS - begin)), all = (rows + 15) / 16;  // tiles
#if PAIR
    int first_tiles = all;
    all += (rows2 + 15) / 16;
#endif
    auto tile_of = [&](int tile) { return OF(tile, tile, tile - first_tiles); };  // in its own matrix
    auto fetch = [&](int tile, int place) {
        place += warp * DEPTH;
        if (lane == 0) {
            unsigned char *to = ring + place * (ITERS * CODES);
            barrier_expect(full + place, steps * CODES);
            for (int i = 0; i < steps; i++, to += CODES) {
#if GLU
                copy_tile(to, &codes, (begin + i) * 128, tile * 8, full + place);
                copy_tile(to + CODES / 2, &codes, (begin + i) * 128, rows / 2 + tile * 8, full + place);
#else
                copy_tile(to, OF(tile, &codes, &codes2), (begin + i) * 128, tile_of(tile) * 16, full + place);
#endif
            }
        }
        if (lane < 16) {
            int row = min(GLU ? tile * 8 + lane % 8 + (lane < 8 ? 0 : rows / 2) : tile_of(tile) * 16 + lane, OF(tile, rows, rows2) - 1);
            const unsigned short *from = OF(tile, w_scale, w_scale2) + (size_t)row * GROUPS + begin * 4;
            unsigned char *to = scale_ring + place * (ITERS * SCALES) + lane * 8;
#pragma unroll
            for (int i = 0; i < ITERS; i++) {
                if (WHOLE || i < steps) copy_scales(to + i * SCALES, from + i * 4);
            }
        }
    };
    if (lane == 0) {
        for (int i = 0; i < DEPTH; i++) barrier_init(full + warp * DEPTH + i, 1);
        barriers_ready();
    }
    __syncwarp();  // racecheck takes uniform instructions for those of all lanes
    int first = blockIdx.x * TILES, stride = gridDim.x * TILES;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (first + i * stride < all) fetch(first + i * stride + warp / KSPLIT, i);
        copies_commit();
    }
#if INPUT == 1 || INPUT == 2
    float4 v[EACH * 4], gain[EACH * 4];
    auto vector_of = [&](int i) {  // of a unit, which has one in each quarter of its group
        int unit = threadIdx.x + i / 4 * THREADS;
        return unit / 8 * 32 + i % 4 * 8 + unit % 8;
    };
#if INPUT == 2
#pragma unroll
    for (int i = 0; i < EACH * 4; i++) gain[i] = vector_or_zero(norm, vector_of(i), COLS);
#endif
#endif
#if PAIR
    ConvEntries entries = entries_of(0, step, token_seq, state_from, state_to);
#endif
    start_dependents();
    wait_for_before();

    uint2 x[ITERS][4];  // this thread's share of each group's bits
#if INPUT == 3
    float x_scale = *scale;
#pragma unroll
    for (int i = 0; i < ITERS * 4; i++) {
        int g = 4 * (WHOLE ? begin + i / 4 : min(begin + i / 4, STEPS - 1)) + i % 4;
        unsigned both = ((const unsigned *)input)[g * WARP + lane];
        x[i / 4][i % 4] = make_uint2(both & 0x55555555u, both >> 1 & 0x55555555u);
    }
#else
    int words[EACH][4], done = 0;
#if INPUT
#pragma unroll
    for (int i = 0; i < EACH * 4; i++) v[i] = vector_or_zero((const float *)input, vector_of(i), COLS);
    float x_scale = norm_quant_row<WARPS, INPUT == 2>(v, gain, COLS, eps, [&](unsigned, int word) { words[done / 4][done % 4] = word, done++; });
#else
#pragma unroll
    for (int i = 0; i < EACH * 4; i++) {
        int unit = min((int)threadIdx.x + i / 4 * THREADS, UNITS - 1);
        words[i / 4][i % 4] = ((const int *)input)[unit / 8 * 32 + i % 4 * 8 + unit % 8];
    }
    float x_scale = *scale;
#endif
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int unit = threadIdx.x + i * THREADS;
        if (EACH * THREADS != UNITS && unit >= UNITS) break;  // whole warps
        // Words 0 to 3 of a group are in turn with words 4 to 7, as a thread needs one of each.
        unsigned *to = bits + unit / 8 * GROUP_WORDS + unit % 4 * 2 + unit / 4 % 2;
#pragma unroll
        for (int bit = 0; bit < 8; bit++) {
            unsigned word = 0;
#pragma unroll
            for (int p = 0; p < 4; p++) {  // the highest two bits of a code's byte are of the first columns
                const int up = 6 - 2 * p - bit;
                unsigned moved = up > 0 ? (unsigned)words[i][p] << (up > 0 ? up : 0) : (unsigned)words[i][p] >> (up < 0 ? -up : 0);
                word |= moved & 0x01010101u << (6 - 2 * p);
            }
            to[bit * 8] = word;
        }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < ITERS; i++) {
        int g = 4 * (WHOLE ? begin + i : min(begin + i, STEPS - 1));
#pragma unroll
        for (int j = 0; j < 4; j++) x[i][j] = *(const uint2 *)(bits + (g + j) * GROUP_WORDS + group * 8 + quarter * 2);
    }
#endif
    int even = 1 << 2 * quarter, odd = quarter == 3 ? -128 : 2 << 2 * quarter;  // what this thread's two bits count
    for (int round = 0;; round++) {
        // Another warp adds each time, as the others go on.
        int adder = (threadIdx.x + round % WARPS * WARP) % THREADS, r = adder % 16, t = min(adder / 16, TILES - 1);
        int row = GLU ? (first + t) * 8 + r % 8 + (r < 8 ? 0 : rows / 2) : tile_of(first + t) * 16 + r;
        bool adds = adder < TILES * 16 && (GLU ? (first + t) * 8 + r % 8 < rows / 2 : row < OF(first + t, rows, rows2));
#if ADD
        float old = adds ? out[row] : 0.0f;
#elif PAIR
        ConvColumn column;
        if (adds) COLUMN(column, first + t, entries, row);
#endif
        int place = warp * DEPTH + round % DEPTH;
        copies_wait<DEPTH - 1>();
        barrier_wait(full + place, round / DEPTH % 2);
        __syncwarp();
        // Copies exchange the pieces of 16 bytes of a row by its number, so that rows fall into different banks.
        unsigned codes_at = place * (ITERS * CODES) + group * 128 + quarter * 4 | group << 4;
        auto word_at = [&](int step, int piece, int row) {
            return *(const unsigned *)(ring + (codes_at ^ piece * 16) + (step * CODES + row * 128));
        };
        float results[ITERS * 2];
        unsigned words_of[2][2][4];  // of the two groups that are multiplied, and of those after
        auto load = [&](int i) {
#pragma unroll
            for (int j = 0; j < 8; j++) words_of[i % 2][j / 4][j % 4] = word_at(i / 2, i % 2 * 4 + j / 2, j % 2 * 8);
        };
        load(0);
        const unsigned char *scale_at = scale_ring + place * (ITERS * SCALES) + (group + quarter / 2 * 8) * 8 + quarter % 2 * 2;
        float *terms_now = terms + round % 2 * (TILES * 16 * PITCH);
        float *to = terms_now + (warp / KSPLIT * 16 + group + quarter / 2 * 8) * PITCH + quarter % 2;
#pragma unroll
        for (int i = 0; i < ITERS * 2; i++) {  // two groups
            if (i + 1 < ITERS * 2) load(i + 1);
            int both[2];  // of each group: this thread's bits, of row low and 65,536 times those of row high
#pragma unroll
            for (int g = 0; g < 2; g++) {
                int ones[4] = {}, twos[4] = {};
                const unsigned(&a)[4] = words_of[i % 2][g];
                uint2 b = x[i / 2][i % 2 * 2 + g];
                count(ones, a, b.x, b.y);
                count(twos, a, b.x << 1, b.y << 1);
                both[g] = (ones[0] + (ones[2] << 16)) * even + (ones[1] + (ones[3] << 16)) * odd;
                both[g] -= (twos[0] + (twos[2] << 16)) * (2 * even) + (twos[1] + (twos[3] << 16)) * (2 * odd);
            }
            // Each of four threads gets the sum of one group and row: of group quarter % 2, and of the high row where quarter is 2 or 3.
            // A sum fits into 16 bits: its magnitude is at most 128 times 128.
            int sum = quarter % 2 ? both[1] : both[0];
            sum += __shfl_xor_sync(FULL, quarter % 2 ? both[0] : both[1], 1);
            sum += __shfl_xor_sync(FULL, sum, 2);
            int total = quarter / 2 ? sum + 0x8000 >> 16 : (int)(short)sum;
            float unit = to_float(f16{*(const unsigned short *)(scale_at + i / 2 * SCALES + i % 2 * 4)});
            results[i] = __fmul_rn((float)total, unit);
        }
#pragma unroll
        for (int i = 0; i < ITERS * 2; i++) {
            if (WHOLE || i / 2 < steps) to[begin * 4 + i * 2] = results[i];
        }
        __syncwarp();
        if (first + DEPTH * stride < all) fetch(first + DEPTH * stride + warp / KSPLIT, round % DEPTH);
        copies_commit();
        __syncthreads();
        if (adder < (TILES * 16 + WARP - 1) / WARP * WARP) {
            const float *row_terms = terms_now + (t * 16 + r) * PITCH;
            float value = 0.0f;
#pragma unroll 32
            for (int g = 0; g < GROUPS; g++) value = __fadd_rn(value, row_terms[g]);
            value = __fmul_rn(value, x_scale);
#if GLU
            float up = __shfl_down_sync(FULL, value, 8);
            if (adds && r < 8) out[row] = act(value) * up;
#elif ADD  // the contract rounds this sum separately
            if (adds) out[row] = __fadd_rn(old, value);
#elif PAIR
            if (adds) PUT(column, first + t, 0, row, value);
#else
            if (adds) out[row] = value;
#endif
        }
        first += stride;
        if (first >= all) break;
    }
}
