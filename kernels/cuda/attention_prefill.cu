// Attention of many tokens over a cache of f16 or int8, on the tensor cores, in tiles of 64 tokens of one sequence by 64 positions with a
// running maximum (FlashAttention; Dao 2023). A block of 8 warps has a tile and a head, a warp 16 of its tokens and half of the
// positions of every tile; the results of the two halves are merged at the end.
//
// Two tiles of keys and values are in shared memory, one filling as the other is used; values are transposed on their way into
// registers. Codes of int8 become halves on their way into shared memory, exactly; the scales of keys are part of the scores,
// those of values of the weights. Tiles of tokens are in the grid's last dimension, so that tiles in use come before unused ones.
#include "attention.cuh"
#include "cache.cuh"
#define TILE 64
#define WARPS 8
#define SPAN (TILE / 2) /* positions of a tile that a warp takes */
#define PITCH (DIM + 8) /* halves: 16 bytes, so that eight rows fall into different banks */
#define CHUNKS (DIM / 32)
#define EACH (16 / (int)sizeof(kv_t)) /* dimensions in 16 bytes of the cache */
#define LOADS (TILE * DIM / EACH / (WARPS * WARP)) /* of keys, and of values, that a thread makes for a tile */
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices, from the rows that the lanes name eight by eight.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(unsigned (&m)[4], const f16 *row) {
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(at) : "memory");
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
attention_prefill(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                  const float *qkv, const kv_t *keys, const kv_t *values, float *out) {
    extern __shared__ __align__(16) f16 tiles[];  // [2][keys, values][TILE][PITCH]
#if KV_I8
    __shared__ __align__(8) float scales[2][3][TILE];  // of keys; log2 of those of values; the factors that undo the latter
#endif
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4, head = blockIdx.x;
    int part = warp / 4, token0 = warp % 4 * 16;
    start_dependents();

    TokenTile mine;
    if (!find_tile(mine, step, seq_begin, seq_len, TILE)) return;
    int seq = mine.seq, end = mine.end, m0 = mine.first, position0 = mine.position, length = mine.length;
    const int *table = step + block_table + seq * max_blocks;
    int kv_head = head / (HEADS / KV_HEADS);

    int begin = window_begin(position0 + 1) / TILE * TILE;
    auto held = [&](int p) { return p < length && !behind_window(p, position0 + 1); };  // what no token sees may be NaN
    auto place = [&](int p) { return row_of(table[p / BLOCK], p % BLOCK, kv_head, KV_HEADS); };
    auto tile_of = [&](int start) { return tiles + start / TILE % 2 * 2 * TILE * PITCH; };
#if KV_I8
    // Codes wait in registers until the previous tile no longer needs its place.
    uint4 codes[2][LOADS];
    float scale[2];
    auto fetch = [&](int start) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int load = threadIdx.x + i * WARPS * WARP, p = start + load / (DIM / EACH);
            size_t at = (held(p) ? place(p) : 0) + load % (DIM / EACH) * EACH;
            codes[0][i] = held(p) ? *(const uint4 *)(keys + at) : make_uint4(0, 0, 0, 0);
            codes[1][i] = held(p) ? *(const uint4 *)(values + at) : make_uint4(0, 0, 0, 0);
        }
        int p = start + threadIdx.x % TILE, block = held(p) ? table[p / BLOCK] : 0;
        scale[0] = held(p) ? *scale_of(keys, block, p % BLOCK, kv_head, KV_HEADS) : 0.0f;
        scale[1] = held(p) ? *scale_of(values, block, p % BLOCK, kv_head, KV_HEADS) : 0.0f;
    };
    auto store = [&](int start) {
#pragma unroll
        for (int i = 0; i < 2 * LOADS; i++) {
            int load = threadIdx.x + i / 2 * WARPS * WARP;
            uint4 raw = codes[i % 2][i / 2];
            uint4 *to = (uint4 *)(tile_of(start) + (i % 2 * TILE + load / (DIM / EACH)) * PITCH + load % (DIM / EACH) * EACH);
            to[0] = code_halves(raw.x, raw.y), to[1] = code_halves(raw.z, raw.w);
        }
        auto &to = scales[start / TILE % 2];
        float unit = exponent(scale[1]);
        if (threadIdx.x < TILE) {
            to[0][threadIdx.x] = scale[0] * (1.0f / Q_UNIT), to[1][threadIdx.x] = unit, to[2][threadIdx.x] = power(-unit);
        }
    };
#else
    auto fetch = [&](int start) {
        f16 *to = tile_of(start);
        if (start < length) {
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                int load = threadIdx.x + i * WARPS * WARP, row = load / (DIM / EACH), at = load % (DIM / EACH) * EACH, p = start + row;
                bool there = held(p);
                size_t from = there ? place(p) + at : 0;
                copy_async(to + row * PITCH + at, keys + from, there);
                copy_async(to + (TILE + row) * PITCH + at, values + from, there);
            }
        }
        asm volatile("cp.async.commit_group;");
    };
#endif
    wait_for_before();
    fetch(begin);
#if KV_I8
    store(begin);
#endif

    unsigned q[CHUNKS][2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int m = min(m0 + token0 + group + 8 * h, end - 1);
        const float2 *row = (const float2 *)(qkv + ((size_t)m * (HEADS + 2 * KV_HEADS) + head) * DIM) + quarter;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 v = row[c * 16 + i * 4];
                const float unit = rsqrtf(DIM) * (LOG2_E * Q_UNIT);
                q[c][i / 2][i % 2 * 2 + h] = halves(v.x * unit, v.y * unit);
            }
        }
    }

    float sums[DIM / 8][4] = {}, largest[2] = {LOWEST, LOWEST}, total[2] = {};
    for (int start = begin; start < length; start += TILE) {
#if !KV_I8
        asm volatile("cp.async.wait_group 0;");
#endif
        __syncthreads();
        fetch(start + TILE);
        const f16 *key = tile_of(start), *value = key + TILE * PITCH;
        key += part * SPAN * PITCH, value += part * SPAN * PITCH;
        float score[SPAN / 8][4] = {};
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int n = 0; n < SPAN / 8; n++) {
                unsigned k[4];
                load_matrices<false>(k, key + (n * 8 + lane % 8) * PITCH + c * 32 + lane / 8 * 8);
                mma(score[n], q[c][0], k[0], k[1]);
                mma(score[n], q[c][1], k[2], k[3]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int position = position0 + token0 + group + 8 * h;  // of this thread's tokens
            float top = largest[h];
#pragma unroll
            for (int n = 0; n < SPAN / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int p = start + part * SPAN + n * 8 + quarter * 2 + i;
#if KV_I8
                    const auto &of = scales[start / TILE % 2];
                    score[n][2 * h + i] = score[n][2 * h + i] * of[0][p - start] + of[1][p - start];
#endif
                    if (p > position || p >= length || behind_window(p, position + 1)) score[n][2 * h + i] = -INFINITY_F;
                    top = fmaxf(top, score[n][2 * h + i]);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
            top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
            float correction = power(largest[h] - top);
            largest[h] = top;
            total[h] *= correction;
#pragma unroll
            for (int n = 0; n < SPAN / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    score[n][2 * h + i] = power(score[n][2 * h + i] - top);
#if KV_I8
                    // A place that the token does not see may hold NaN.
                    float undo = scales[start / TILE % 2][2][part * SPAN + n * 8 + quarter * 2 + i];
                    total[h] += score[n][2 * h + i] == 0.0f ? 0.0f : score[n][2 * h + i] * undo;
#else
                    total[h] += score[n][2 * h + i];
#endif
                }
            }
#pragma unroll
            for (int d = 0; d < DIM / 8; d++) sums[d][2 * h] *= correction, sums[d][2 * h + 1] *= correction;
        }
#pragma unroll
        for (int n = 0; n < SPAN / 16; n++) {
            unsigned weight[4] = {halves(score[2 * n][0], score[2 * n][1]), halves(score[2 * n][2], score[2 * n][3]),
                                  halves(score[2 * n + 1][0], score[2 * n + 1][1]), halves(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
            for (int d = 0; d < DIM / 16; d++) {
                unsigned v[4];
                load_matrices<true>(v, value + (n * 16 + lane % 16) * PITCH + d * 16 + lane / 16 * 8);
                mma(sums[2 * d], weight, v[0], v[1]);
                mma(sums[2 * d + 1], weight, v[2], v[3]);
            }
        }
#if KV_I8
        store(start + TILE);
#endif
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(FULL, total[h], 1);
        total[h] += __shfl_xor_sync(FULL, total[h], 2);
    }
    // Results of the warps of part 1; a thread's numbers are as far apart as there are threads.
    float *found = (float *)tiles + threadIdx.x % (WARPS / 2 * WARP);
    auto at = [&](int i) -> float & { return found[i * (WARPS / 2 * WARP)]; };
    __syncthreads();
    if (part) {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) at(i) = sums[i / 4][i % 4];
#pragma unroll
        for (int h = 0; h < 2; h++) at(DIM / 2 + h) = largest[h], at(DIM / 2 + 2 + h) = total[h];
    }
    __syncthreads();
    if (part) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float other = at(DIM / 2 + h), top = fmaxf(largest[h], other), mine = power(largest[h] - top), theirs = power(other - top);
        float inverse = 1.0f / (total[h] * mine + at(DIM / 2 + 2 + h) * theirs);
        mine *= inverse, theirs *= inverse;
        int m = m0 + token0 + group + 8 * h;
        if (m >= end) continue;
        float *row = out + ((size_t)m * HEADS + head) * DIM;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) {
            *(float2 *)(row + d * 8 + quarter * 2) = make_float2(sums[d][2 * h] * mine + at(d * 4 + 2 * h) * theirs,
                                                                 sums[d][2 * h + 1] * mine + at(d * 4 + 2 * h + 1) * theirs);
        }
    }
}
