#include "attention.cuh"
#include "cache.cuh"
#include "hopper.cuh"
// Attention of many tokens over a cache of f16 or int8 on Hopper's asynchronous tensor cores (wgmma), with a running maximum (FlashAttention;
// Dao 2023). A block has 128 rows: as many tokens of one sequence as that makes with all query heads of a key/value head, which
// share its keys and values. Two warpgroups have 64 rows each; a thread of a third has the copy engine fetch the cache's blocks,
// TILE positions of keys and of values at a time, into STAGES places for each.
//
// While the values of a tile are multiplied, the scores of the next are computed (Shah et al. 2024). Keys and values lie as in
// the cache, one position after the other: 128 bytes in the 128-byte swizzle, one panel for every 64 dimensions.
// Tiles of tokens are in the grid's last dimension, so that tiles in use come before unused ones.
//
// With an int8 cache, the third warpgroup has blocks of the cache copied as they are, two tiles ahead, and stores their codes as halves,
// exactly: two of its warps those of keys, two those of values. The scales of keys go into the scores, those of values into the weights.
#define ROWS 128
#define GROUP (HEADS / KV_HEADS)
#define TOKENS (ROWS / GROUP) /* of a block */
#define TILE 128
#define STAGES 2
#define PANELS (DIM / 64)
#define PANEL (TILE * 128) /* bytes */
#define SIDE (TILE * DIM * 2) /* bytes of a tile's keys, and of its values */
#define CONSUMERS (ROWS / 16) /* warps */
#if KV_I8
#define FILLERS ARRIVALS(PRODUCERS) /* arrivals at the barrier of a place that is filled */
#define PRODUCERS 2 /* warps for keys, and as many for values, of which each fills its part of a place */
#define PRODUCER_REGISTERS 56
#define CONSUMER_REGISTERS 224
#define UNITS (2 * STAGES) /* tiles whose scales are kept: a key's place is free before its scale has been used */
#define SLOTS 4 /* for codes of tiles of keys and of values, by turns */
#define BLOCK_BYTES (BLOCK * (DIM + 4)) /* of a head in a block of the cache: codes and scales */
#define SLOT (TILE / BLOCK * BLOCK_BYTES)
#else
#define FILLERS 1
#define PRODUCER_REGISTERS 24
#define CONSUMER_REGISTERS 240
#endif
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

#define ACC(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define ACC4(n) ACC(n), ACC(n + 1), ACC(n + 2), ACC(n + 3)
#define NAMES32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES64 NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define A_AND_B : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(TRANSPOSED)

// c = a b, or c + a b where ADD. TRANSPOSED: b lies row after row (of 16 each), else column after column.
template <int ADD, int TRANSPOSED>
__device__ __forceinline__ void multiply(float (&c)[16][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %69, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" NAMES64 "}, {%64,%65,%66,%67}, %68, add, 1, 1, %70;\n\t}"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12) A_AND_B);
}
template <int ADD, int TRANSPOSED>
__device__ __forceinline__ void multiply(float (&c)[8][4], const unsigned (&a)[4], unsigned long long b) {
    asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES32 "}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n\t}"
                 : ACC4(0), ACC4(4) A_AND_B);
}

template <int N>
__device__ __forceinline__ void made(float (&c)[N][4]) {  // nothing that reads c may come before this
#pragma unroll
    for (int n = 0; n < N; n++) asm volatile("" : ACC(n));
}

extern "C" __global__ void __launch_bounds__(3 * ROWS, 1)
attention_wgmma(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, const float *qkv,
#if KV_I8
                const kv_t *keys, const kv_t *values, float *out) {
    // Of each position: the scale of its key, the logarithm of that of its value, and what undoes the latter in a weight (cache.cuh).
    __shared__ __align__(16) float2 units[UNITS][TILE];
    __shared__ __align__(8) float undos[UNITS][TILE];
#else
                const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values, float *out) {
#endif
    extern __shared__ unsigned char unaligned[];  // [STAGES][keys, values][SIDE], 1024 bytes to align it, and [SLOTS][SLOT] of codes
    __shared__ Barrier full[2 * STAGES], empty[2 * STAGES];
    unsigned char *places = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024;
#if KV_I8
    __shared__ Barrier copied[SLOTS], converted[SLOTS];
    unsigned char *slots = places + 2 * STAGES * SIDE;
#endif
    int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int kv_head = blockIdx.x;
    start_dependents();

    TokenTile mine;
    if (!find_tile(mine, step, seq_begin, seq_len, TOKENS)) return;
    int seq = mine.seq, end = mine.end, m0 = mine.first, position0 = mine.position, length = mine.length;
    int lowest = window_begin(position0 + 1), origin = lowest / TILE * TILE;  // of the first token's window; of the first tile
    int count = (length - origin + TILE - 1) / TILE;

    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) barrier_init(full + i, FILLERS), barrier_init(empty + i, ARRIVALS(CONSUMERS));
#if KV_I8
        for (int i = 0; i < SLOTS; i++) barrier_init(copied + i, 1), barrier_init(converted + i, ARRIVALS(i % 2 ? 2 * PRODUCERS : PRODUCERS));
#endif
        barriers_ready();
    }
    __syncthreads();

    if (warp >= CONSUMERS) {
        registers_less<PRODUCER_REGISTERS>();
        const int *table = step + block_table + seq * max_blocks;
#if KV_I8
        const int lanes = DIM / 16, rows = WARP / lanes;  // of a row; at once
        int side = (warp - CONSUMERS) / PRODUCERS, part = (warp - CONSUMERS) % PRODUCERS, column = lane % lanes;
        // Lanes of the second panel take the neighbouring row, so that eight lanes read all banks and write to all.
        int own = lane / lanes ^ column / 4, piece = column % 4 * 2 ^ own;
        auto copy = [&](int t) {  // by a warp
            if (t >= 2 * count) return;
            int start = origin + t / 2 * TILE, blocks = (min(TILE, length - start) + BLOCK - 1) / BLOCK, at = t % SLOTS;
            if (t >= SLOTS) barrier_wait(converted + at, t / SLOTS & 1 ^ 1);
            if (lane == 0) barrier_expect(copied + at, blocks * BLOCK_BYTES);
            __syncwarp();
            if (lane < blocks) {
                size_t from = row_of(table[start / BLOCK + lane], 0, kv_head, KV_HEADS);
                copy_bytes(slots + at * SLOT + lane * BLOCK_BYTES, (t % 2 ? values : keys) + from, BLOCK_BYTES, copied + at);
            }
        };
        auto place = [&](int t, int row) { return slots + t % SLOTS * SLOT + row / BLOCK * BLOCK_BYTES; };  // of a row's block
        auto scale_at = [&](int t, int row) { return *(const float *)(place(t, row) + BLOCK * DIM + row % BLOCK * 4); };
        wait_for_before();
        if (part == 0) copy(side), copy(side + 2);
        for (int t = side; t < 2 * count; t += 2) {  // keys or values of a tile
            int first = part * (TILE / PRODUCERS), at = t % (2 * STAGES);
            if (t >= 2 * STAGES) barrier_wait(empty + at, t / (2 * STAGES) & 1 ^ 1);
            barrier_wait(copied + t % SLOTS, t / SLOTS & 1);
            if (side == 0) {  // the scales of values, too, which come with their codes
                barrier_wait(copied + (t + 1) % SLOTS, t / SLOTS & 1);
                for (int row = first + lane; row < first + TILE / PRODUCERS; row += WARP) {
                    int p = origin + t / 2 * TILE + row;
                    bool there = p < length && !behind_window(p, position0 + 1);
                    float key = there ? scale_at(t, row) : 0.0f, value = there ? scale_at(t + 1, row) : 0.0f, unit = exponent(value);
                    units[t / 2 % UNITS][row] = make_float2(key * (1.0f / Q_UNIT), unit);
                    // A token that does not see a position has a weight of 0 there, which NaN would not leave so.
                    undos[t / 2 % UNITS][row] = value == value ? power(-unit) : 0.0f;
                }
            }
            // Row first + i * rows + own: all that depends on i is known to the compiler, as `first` is a multiple of 32, and `rows` divides 8.
            const unsigned char *from = place(t, first) + (first % BLOCK + own) * DIM + column * 16;
            unsigned char *to = places + at * SIDE + column / 4 * PANEL + (first + own) * 128;
#pragma unroll
            for (int i = 0; i < TILE / PRODUCERS / rows; i++) {
                const int row = i * rows, swizzle = row % 8;
                uint4 codes = *(const uint4 *)(from + (BLOCK < TILE / PRODUCERS ? row / BLOCK * BLOCK_BYTES + row % BLOCK * DIM : row * DIM));
                *(uint4 *)(to + row * 128 + (piece ^ swizzle) * 16) = code_halves(codes.x, codes.y);
                *(uint4 *)(to + row * 128 + (piece ^ swizzle ^ 1) * 16) = code_halves(codes.z, codes.w);
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            warp_arrive(full + at, lane), warp_arrive(converted + t % SLOTS, lane);
            if (side == 0) warp_arrive(converted + (t + 1) % SLOTS, lane);
            if (part == t / 2 % 2) copy(t + SLOTS);
        }
#else
        if (threadIdx.x == CONSUMERS * WARP) {
            wait_for_before();
            for (int t = 0; t < 2 * count; t++) {  // keys, values, keys, …
                int start = origin + t / 2 * TILE, blocks = (min(TILE, length - start) + BLOCK - 1) / BLOCK, at = t % (2 * STAGES);
                if (t >= 2 * STAGES) barrier_wait(empty + at, t / (2 * STAGES) & 1 ^ 1);
                barrier_expect(full + at, blocks * BLOCK * DIM * 2);
                for (int b = 0; b < blocks; b++) {
                    int row = (table[start / BLOCK + b] * KV_HEADS + kv_head) * BLOCK;
                    for (int p = 0; p < PANELS; p++) {
                        copy_tile(places + at * SIDE + p * PANEL + b * BLOCK * 128, t % 2 ? &values : &keys, p * 128, row, full + at);
                    }
                }
            }
        }
#endif
    } else {
        registers_more<CONSUMER_REGISTERS>();
        wait_for_before();
        // This thread's two rows: the token, and its place in q and out.
        int m[2], position[2];
        size_t place[2];
        unsigned q[DIM / 16][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = warp * 16 + group + 8 * h, head = kv_head * GROUP + row % GROUP;
            m[h] = row < TOKENS * GROUP ? m0 + row / GROUP : end;
            int token = min(m[h], end - 1);
            position[h] = position0 + token - m0;
            place[h] = ((size_t)token * HEADS + head) * DIM;
            const float2 *from = (const float2 *)(qkv + ((size_t)token * (HEADS + 2 * KV_HEADS) + head) * DIM) + quarter;
#pragma unroll
            for (int i = 0; i < DIM / 8; i++) {
                float2 v = from[i * 4];
                const float unit = rsqrtf(DIM) * (LOG2_E * Q_UNIT);
                q[i / 2][i % 2 * 2 + h] = halves(v.x * unit, v.y * unit);
            }
        }

        float sums[DIM / 8][4] = {}, score[TILE / 8][4], largest[2] = {LOWEST, LOWEST}, total[2] = {}, correction[2];
        unsigned weight[TILE / 16][4];
        auto begin_scores = [&](int t) {
            int at = t % STAGES * 2;
            barrier_wait(full + at, t / STAGES & 1);
            unsigned long long key = operand(places + at * SIDE);
            products_begin();
            multiply<0, 0>(score, q[0], key);
#pragma unroll
            for (int k = 1; k < DIM / 16; k++) multiply<1, 0>(score, q[k], key + (k / 4 * PANEL + k % 4 * 32) / 16);
            products_commit();
        };
        auto begin_sums = [&](int t) {
            int at = t % STAGES * 2 + 1;
            barrier_wait(full + at, t / STAGES & 1);
            unsigned long long value = operand(places + at * SIDE, PANEL);
            products_begin();
#pragma unroll
            for (int k = 0; k < TILE / 16; k++) multiply<1, 1>(sums, weight[k], value + k * (16 * 128 / 16));
            products_commit();
        };
        auto release = [&](int t, int side) { warp_arrive(empty + t % STAGES * 2 + side, lane); };
        auto weigh = [&](int t) {  // scores to weights, and the factor for the sums so far
            int start = origin + t * TILE;
#if KV_I8
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                float4 unit = *(const float4 *)&units[t % UNITS][n * 8 + quarter * 2];
                score[n][0] = score[n][0] * unit.x + unit.y, score[n][1] = score[n][1] * unit.z + unit.w;
                score[n][2] = score[n][2] * unit.x + unit.y, score[n][3] = score[n][3] * unit.z + unit.w;
            }
#endif
            if (start + TILE - 1 > position0 || behind_window(start, position0 + TOKENS)) {
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int p = start + n * 8 + quarter * 2 + i % 2;
                        if (p > position[i / 2] || behind_window(p, position[i / 2] + 1)) score[n][i] = -INFINITY_F;
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = largest[h];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) top = fmaxf(top, fmaxf(score[n][2 * h], score[n][2 * h + 1]));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
                top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
                correction[h] = power(largest[h] - top);
                largest[h] = top;
                total[h] *= correction[h];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) {
                    score[n][2 * h] = power(score[n][2 * h] - top), score[n][2 * h + 1] = power(score[n][2 * h + 1] - top);
#if KV_I8
                    float2 undo = *(const float2 *)&undos[t % UNITS][n * 8 + quarter * 2];
                    total[h] += score[n][2 * h] * undo.x + score[n][2 * h + 1] * undo.y;
#else
                    total[h] += score[n][2 * h] + score[n][2 * h + 1];
#endif
                }
            }
        };
        auto pack_weights = [&] {
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) {
                weight[n / 2][n % 2 * 2] = halves(score[n][0], score[n][1]);
                weight[n / 2][n % 2 * 2 + 1] = halves(score[n][2], score[n][3]);
            }
        };

        begin_scores(0);
        products_wait<0>();
        made(score);
        release(0, 0);
        weigh(0);
        pack_weights();
#if !KV_I8
        // Values of places past the last position, or behind the window, may be NaN, which a weight of 0 would not hide.
        auto clear = [&](int t, int from, int to) {
            int at = t % STAGES * 2 + 1;
            barrier_wait(full + at, t / STAGES & 1);
            for (int i = threadIdx.x; i < (to - from) * 8 * PANELS; i += CONSUMERS * WARP) {
                int row = from + i / (8 * PANELS), panel = i / 8 % PANELS;
                *(uint4 *)(places + at * SIDE + panel * PANEL + row * 128 + i % 8 * 16) = make_uint4(0, 0, 0, 0);
            }
            asm volatile("fence.proxy.async.shared::cta;\n\tbar.sync 1, %0;" ::"n"(CONSUMERS * WARP) : "memory");
        };
        if (WINDOW) clear(0, 0, lowest - origin);
#endif
        for (int t = 1; t < count; t++) {
            begin_scores(t);
            begin_sums(t - 1);
            products_wait<1>();
            made(score);
            release(t, 0);
            weigh(t);
            made(score);  // while the values of the tile before are multiplied
            products_wait<0>();
            made(sums);
            release(t - 1, 1);
#pragma unroll
            for (int d = 0; d < DIM / 8; d++) {
#pragma unroll
                for (int i = 0; i < 4; i++) sums[d][i] *= correction[i / 2];
            }
            pack_weights();
        }
#if !KV_I8
        clear(count - 1, length - origin - (count - 1) * TILE, TILE);
#endif
        begin_sums(count - 1);
        products_wait<0>();
        made(sums);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(FULL, total[h], 1);
            total[h] += __shfl_xor_sync(FULL, total[h], 2);
            if (m[h] >= end) continue;
            float inverse = 1.0f / total[h];
#pragma unroll
            for (int d = 0; d < DIM / 8; d++) {
                *(float2 *)(out + place[h] + d * 8 + quarter * 2) = make_float2(sums[d][2 * h] * inverse, sums[d][2 * h + 1] * inverse);
            }
        }
    }
}
