// attention_prefill over an f16 cache on the matrix units, in tiles of 64 tokens of one sequence by 32 positions with a running maximum
// (FlashAttention; Dao 2023). A work-group of 4 waves has a tile and a head, a wave 16 of its tokens. Scores are made with positions as
// rows and tokens as columns, so that a lane has one token's, and they are in place for the product with the values, which are transposed
// on their way into local memory. The next tile's keys and values are on their way to registers while this one's are multiplied.
//
// Grid: [heads, tiles].
#include "amd/matrix.clh"
#include "attention_tiles.clh"

#define WAVES 4
#define QUERIES (16 * WAVES)
#define KEYS 32
#define THREADS (MATRIX_WAVE * WAVES)
#define CHUNKS (DIM / 16)
// 16 bytes each: a position's keys, and a dimension's values, with room so that neighbours fall into different banks.
#define VECTORS (DIM / 8)
#define K_PITCH (VECTORS + 1)
#define V_PITCH (KEYS / 8 + 1)
#define K_COUNT (KEYS * VECTORS)
#define V_COUNT (KEYS / 2 * VECTORS) /* of two positions */
#define K_LOADS ((K_COUNT + THREADS - 1) / THREADS)
#define V_LOADS ((V_COUNT + THREADS - 1) / THREADS)
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WAVES void attention_prefill_matrix(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global const KV *keys, global const KV *values, global float *out, int heads, int kv_heads) {
    local uint4 key[KEYS * K_PITCH], value[DIM * V_PITCH];
    int item = get_local_id(0), wave = item / MATRIX_WAVE, lane = item % MATRIX_WAVE;
    int line = lane % 16, part = PARTS == 1 ? 0 : lane / 16, head = get_group_id(0), kv_head = head / HEAD_GROUP;
    Tile tile = tile_of(step, seq_begin, seq_len, QUERIES, get_group_id(1));
    int length = tile.length, m = tile.begin + wave * 16 + line, position = tile.position + wave * 16 + line;
    if (length == 0) return;
    global const int *table = step + block_table + tile.seq * max_blocks;

    halves16 q[CHUNKS];
    floats16 sums[CHUNKS];
    float q_scale = LOG2_E / sqrt((float)DIM), largest = LOWEST, total = 0.0f;
    global const float *row = qkv + ((size_t)min(m, tile.end - 1) * (heads + 2 * kv_heads) + head) * DIM + part * HALVES;
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        sums[c] = (floats16)(0.0f);
        UNROLL
        for (int i = 0; i < HALVES / 2; i++) q[c][i] = two_halves(row[c * 16 + 2 * i] * q_scale, row[c * 16 + 2 * i + 1] * q_scale);
    }

    uint4 next_k[K_LOADS], next_v[V_LOADS][2];
    _Pragma("unroll 1")
    for (int start = -KEYS; start < length; start += KEYS) {
        int next = start + KEYS;
        if (next < length) {
            // Past the last position, the last one again; its weight is 0.
#define PLACE(p) ((((size_t)table[(p) / BLOCK] * BLOCK + (p) % BLOCK) * kv_heads + kv_head) * VECTORS)
            UNROLL
            for (int i = 0; i < K_LOADS; i++) {
                int at = item + i * THREADS, p = min(next + at / VECTORS, length - 1);
                if (K_COUNT % THREADS == 0 || at < K_COUNT) next_k[i] = ((global const uint4 *)keys)[PLACE(p) + at % VECTORS];
            }
            UNROLL
            for (int i = 0; i < V_LOADS; i++) {
                int at = item + i * THREADS, p = next + at % (KEYS / 2) * 2;
                UNROLL
                for (int j = 0; j < 2; j++) {
                    int there = min(p + j, length - 1);
                    if (V_COUNT % THREADS == 0 || at < V_COUNT) next_v[i][j] = ((global const uint4 *)values)[PLACE(there) + at / (KEYS / 2)];
                }
            }
        }
        if (start >= 0) {
            floats16 score[KEYS / 16];
            float top = LOWEST;
            UNROLL
            for (int t = 0; t < KEYS / 16; t++) {
                local const uint4 *from = key + (t * 16 + A_ROW(line)) * K_PITCH;
                score[t] = (floats16)(0.0f);
                UNROLL
                for (int c = 0; c < CHUNKS; c++) score[t] = multiplied_halves(part_of(from + 2 * c, part), q[c], score[t]);
                UNROLL
                for (int i = 0; i < D_ROWS; i++) {
                    int p = start + t * 16 + D_ITEM(lane) + i;
                    if (p > position || p >= length) score[t][i] = -INFINITY;
                    top = fmax(top, score[t][i]);
                }
            }
            top = fmax(largest, column_max(top, lane));
            float correction = exp2(largest - top);
            largest = top;
            total *= correction;  // of the positions of which this lane has the scores
            UNROLL
            for (int c = 0; c < CHUNKS; c++) sums[c] *= correction;
            UNROLL
            for (int t = 0; t < KEYS / 16; t++) {
                UNROLL
                for (int i = 0; i < D_ROWS; i++) {
                    score[t][i] = exp2(score[t][i] - top);
                    total += score[t][i];
                }
                halves16 weight = as_part(score[t], lane);
                UNROLL
                for (int c = 0; c < CHUNKS; c++)
                    sums[c] = multiplied_halves(part_of(value + (c * 16 + A_ROW(line)) * V_PITCH + 2 * t, part), weight, sums[c]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (next < length) {
            UNROLL
            for (int i = 0; i < K_LOADS; i++) {
                int at = item + i * THREADS;
                if (K_COUNT % THREADS == 0 || at < K_COUNT) key[at / VECTORS * K_PITCH + at % VECTORS] = next_k[i];
            }
            UNROLL
            for (int i = 0; i < V_LOADS; i++) {
                int at = item + i * THREADS;
                local uint *to = (local uint *)(value + at / (KEYS / 2) * 8 * V_PITCH) + at % (KEYS / 2);
                UNROLL
                for (int d = 0; d < 8; d++) {
                    uint a = next_v[i][0][d / 2], b = next_v[i][1][d / 2];
                    if (V_COUNT % THREADS == 0 || at < V_COUNT) to[d * V_PITCH * 4] = d % 2 ? a >> 16 | (b & 0xFFFF0000u) : (a & 0xFFFFu) | b << 16;
                }
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float share = 1.0f / column_add(total, lane);
    if (m >= tile.end) return;
    global float *to = out + ((size_t)m * heads + head) * DIM + D_ITEM(lane);
    UNROLL
    for (int c = 0; c < CHUNKS; c++) {
        UNROLL
        for (int i = 0; i < D_ROWS; i++) to[c * 16 + i] = sums[c][i] * share;
    }
}
