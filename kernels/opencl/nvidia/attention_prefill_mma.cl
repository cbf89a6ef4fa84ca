// attention_prefill over an f16 cache on the matrix units, in tiles of 64 tokens of one sequence by 64 positions with a running
// maximum (FlashAttention; Dao 2023). A work-group of 4 warps has a tile and a head, a warp 16 of its tokens. Keys of the next tile
// are on their way while values are used, and the other way round; values are transposed on their way into registers.
//
// Grid: [heads, tiles].
#include "nvidia/warps.clh"
#include "attention_tiles.clh"

#define TILE 64
#define THREADS (TILE / 16 * WARP)
#define CHUNKS (DIM / 32)
#define UNITS (DIM / 8) /* of 16 bytes, of a row in local memory, exchanged so that eight rows fall into different banks */
#define KV_AT(r, unit) ((r) * UNITS + ((unit) ^ (r) % 8))

inline void fetch(local uint4 *to, global const ushort *cache, global const int *table, int start, int length, int kv_head, int kv_heads) {
    for (int i = get_local_id(0); i < TILE * UNITS && start < length; i += THREADS) {
        int r = i / UNITS, p = start + r, there = p < length;
        size_t from = there ? (((size_t)table[p / BLOCK] * BLOCK + p % BLOCK) * kv_heads + kv_head) * DIM + i % UNITS * 8 : 0;
        copy_async(to + KV_AT(r, i % UNITS), cache + from, there);
    }
    COPY_COMMIT;
}

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void attention_prefill_mma(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global const KV *keys, global const KV *values, global float *out, int heads, int kv_heads) {
    local uint4 key[TILE * UNITS], value[TILE * UNITS];
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4, head = get_group_id(0);
    Tile tile = tile_of(step, seq_begin, seq_len, TILE, get_group_id(1));
    int m0 = tile.begin, end = tile.end, position0 = tile.position, length = tile.length;
    if (length == 0) return;
    global const int *table = step + block_table + tile.seq * max_blocks;
    int kv_head = head / HEAD_GROUP;
    fetch(key, (global const ushort *)keys, table, 0, length, kv_head, kv_heads);
    fetch(value, (global const ushort *)values, table, 0, length, kv_head, kv_heads);

    uint q[CHUNKS][2][4];
    float q_scale = LOG2_E / sqrt((float)DIM);
    UNROLL
    for (int h = 0; h < 2; h++) {
        int m = min(m0 + warp * 16 + group + 8 * h, end - 1);
        global const float2 *row = (global const float2 *)(qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM) + quarter;
        UNROLL
        for (int c = 0; c < CHUNKS; c++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
                float2 v = row[c * 16 + i * 4] * q_scale;
                q[c][i / 2][i % 2 * 2 + h] = halves(v.x, v.y);
            }
        }
    }

    float4 sums[DIM / 8];
    float largest[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
    UNROLL
    for (int d = 0; d < DIM / 8; d++) sums[d] = (float4)(0.0f);
    for (int start = 0; start < length; start += TILE) {
        COPY_WAIT(1);
        barrier(CLK_LOCAL_MEM_FENCE);
        float score[TILE / 8][4];
        UNROLL
        for (int n = 0; n < TILE / 8; n++) {
            float4 found = (float4)(0.0f);
            UNROLL
            for (int c = 0; c < CHUNKS; c++) {
                uint4 k = load_matrices(key + KV_AT(n * 8 + lane % 8, c * 4 + lane / 8));
                found = mma_f16(found, q[c][0][0], q[c][0][1], q[c][0][2], q[c][0][3], k.x, k.y);
                found = mma_f16(found, q[c][1][0], q[c][1][1], q[c][1][2], q[c][1][3], k.z, k.w);
            }
            score[n][0] = found.x, score[n][1] = found.y, score[n][2] = found.z, score[n][3] = found.w;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        fetch(key, (global const ushort *)keys, table, start + TILE, length, kv_head, kv_heads);
        float correction[2];
        UNROLL
        for (int h = 0; h < 2; h++) {
            int position = position0 + warp * 16 + group + 8 * h;  // of this work-item's tokens
            float top = largest[h];
            UNROLL
            for (int n = 0; n < TILE / 8; n++) {
                UNROLL
                for (int i = 0; i < 2; i++) {
                    int p = start + n * 8 + quarter * 2 + i;
                    if (p > position || p >= length) score[n][2 * h + i] = -INFINITY;
                    top = fmax(top, score[n][2 * h + i]);
                }
            }
            top = fmax(top, shuffle_xor(top, 1));
            top = fmax(top, shuffle_xor(top, 2));
            correction[h] = power(largest[h] - top);
            largest[h] = top;
            total[h] *= correction[h];
            UNROLL
            for (int n = 0; n < TILE / 8; n++) {
                UNROLL
                for (int i = 0; i < 2; i++) {
                    score[n][2 * h + i] = power(score[n][2 * h + i] - top);
                    total[h] += score[n][2 * h + i];
                }
            }
        }
        UNROLL
        for (int d = 0; d < DIM / 8; d++) sums[d] *= (float4)(correction[0], correction[0], correction[1], correction[1]);
        COPY_WAIT(1);
        barrier(CLK_LOCAL_MEM_FENCE);
        UNROLL
        for (int n = 0; n < TILE / 16; n++) {
            uint w0 = halves(score[2 * n][0], score[2 * n][1]), w1 = halves(score[2 * n][2], score[2 * n][3]);
            uint w2 = halves(score[2 * n + 1][0], score[2 * n + 1][1]), w3 = halves(score[2 * n + 1][2], score[2 * n + 1][3]);
            UNROLL
            for (int d = 0; d < DIM / 16; d++) {
                uint4 v = load_turned(value + KV_AT(n * 16 + lane % 16, d * 2 + lane / 16));
                sums[2 * d] = mma_f16(sums[2 * d], w0, w1, w2, w3, v.x, v.y);
                sums[2 * d + 1] = mma_f16(sums[2 * d + 1], w0, w1, w2, w3, v.z, v.w);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        fetch(value, (global const ushort *)values, table, start + TILE, length, kv_head, kv_heads);
    }
    UNROLL
    for (int h = 0; h < 2; h++) {
        total[h] += shuffle_xor(total[h], 1);
        total[h] += shuffle_xor(total[h], 2);
        int m = m0 + warp * 16 + group + 8 * h;
        if (m >= end) continue;
        global float2 *row = (global float2 *)(out + ((size_t)m * heads + head) * DIM) + quarter;
        UNROLL
        for (int d = 0; d < DIM / 8; d++) row[d * 4] = (h ? sums[d].zw : sums[d].xy) / total[h];
    }
}
