// attention_prefill over an f16 cache by XMX: a tile of QUERIES rows, each a token and one of the query heads of a key/value head,
// against KEYS positions at a time, with a running maximum (Milakov and Gimelshein 2018). A work-group has a sub-group for each 16
// dimensions of a head. In a step each sub-group makes the scores of 16 positions, then the weights of some of the rows, and adds the
// values of all positions to 16 dimensions of the result.
//
// What XMX multiplies from the left lies in local memory in tiles of 8 rows by 16 columns, a work-item's part at one place.
// A key's 16 neighbouring dimensions are, as they lie in the cache, what a work-item brings from the right; values are put in pairs of
// positions. The caller sees to it that BLOCK is a multiple of 16 and HEAD_GROUP at most QUERIES.
// Grid: [key/value heads, tiles of TOKENS tokens]. A tile that holds the ends of several sequences takes them one after the other.
#include "intel/sub_groups.clh"

#define QUERIES (2 * SG) /* scores and results of 32 do not fit the registers of devices with sub-groups of 8 */
#define KEYS DIM
#define SUB_GROUPS (DIM / 16)
#define WG (SUB_GROUPS * SG)
#define TOKENS (QUERIES / HEAD_GROUP)
#define M_BLOCKS (QUERIES / 8)
#define EACH (16 / SG) /* columns of a work-item among 16 */
#define ROWS_EACH (QUERIES / SUB_GROUPS)
#define PITCH (KEYS + 1)
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */
#if SG == 16
#define COLUMNS ushort /* a work-item's of a row of 16 */
#else
#define COLUMNS uint
#endif

// Where element [row, column] of a matrix with STEPS * 16 columns lies, in tiles: the place of its tile plus the place in that.
#define TILED(row, column, STEPS) \
    ((((row) / 8 * (STEPS) + (column) / 16) * 128) + ((column) % 16 / EACH * 8 + (row) % 8) * EACH + (column) % EACH)

// Where positions p to p + 15 of a sequence lie in the cache, p a multiple of 16.
inline size_t place(global const int *table, int p, int kv_head, int kv_heads) {
    return (((size_t)table[p / BLOCK] * BLOCK + p % BLOCK) * kv_heads + kv_head) * DIM;
}

kernel __attribute__((reqd_work_group_size(WG, 1, 1), intel_reqd_sub_group_size(SG))) void attention_prefill_xmx(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global const ushort *keys, global const ushort *values, global float *out, int heads, int kv_heads) {
    local half query[QUERIES * DIM] __attribute__((aligned(32))), weight[QUERIES * KEYS] __attribute__((aligned(32)));
    local float score[QUERIES * PITCH], scale[QUERIES] __attribute__((aligned(32)));
    local int seen[QUERIES] __attribute__((aligned(32)));  // the last position that a row sees
    int item = get_local_id(0), lane = get_sub_group_local_id(), part = get_sub_group_id(), kv_head = get_group_id(0);
    int own = TILED(part, lane, 1);
    int m0 = get_group_id(1) * TOKENS, tokens = STEP_TOKENS(step), most = min(m0 + TOKENS, tokens);
    for (int i = item; i < QUERIES * DIM; i += WG) {
        int r = i / DIM, d = i % DIM, m = m0 + r / HEAD_GROUP;
        float q = 0.0f;
        if (r < TOKENS * HEAD_GROUP && m < most)
            q = qkv[((size_t)m * (heads + 2 * kv_heads) + kv_head * HEAD_GROUP + r % HEAD_GROUP) * DIM + d];
        query[TILED(r, d, DIM / 16)] = (half)(q / sqrt((float)DIM));
    }

    float8 sums[EACH][M_BLOCKS];                // of all rows; column `lane` of block n is dimension part * 16 + lane * EACH + n
    float largest[ROWS_EACH], total[ROWS_EACH];  // of rows i * SUB_GROUPS + part; the total of this work-item's part of them
    UNROLL
    for (int n = 0; n < EACH; n++) {
        UNROLL
        for (int j = 0; j < M_BLOCKS; j++) sums[n][j] = (float8)(0.0f);
    }
    UNROLL
    for (int i = 0; i < ROWS_EACH; i++) largest[i] = LOWEST, total[i] = 0.0f;

    for (int first = m0; first < most;) {  // a sequence's tokens `first` to `last - 1` of the tile
        int seq = step[token_seq + first], last = min(most, step[seq_begin + seq + 1]);
        global const int *table = step + block_table + seq * max_blocks;
        int length = token_position(step, token_seq, seq_begin, seq_len, last - 1) + 1, offset = length - last;
        for (int r = item; r < QUERIES; r += WG) {
            int m = m0 + r / HEAD_GROUP;
            seen[r] = m >= first && m < last ? offset + m : -1;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int start = 0; start < length; start += KEYS) {
            int p0 = start + part * 16;  // this sub-group's positions
            float8 dots[EACH][M_BLOCKS];
            UNROLL
            for (int n = 0; n < EACH; n++) {
                UNROLL
                for (int j = 0; j < M_BLOCKS; j++) dots[n][j] = (float8)(0.0f);
            }
            if (p0 < length) {
                global const ushort *from = keys + place(table, p0, kv_head, kv_heads);
                global const int8 *key[EACH];
                UNROLL
                for (int n = 0; n < EACH; n++)
                    key[n] = (global const int8 *)(from + (size_t)min(n * SG + lane, length - 1 - p0) * kv_heads * DIM);
                for (int k = 0; k < DIM / 16; k++) {
                    int8 b[EACH];
                    UNROLL
                    for (int n = 0; n < EACH; n++) b[n] = key[n][k];
                    UNROLL
                    for (int j = 0; j < M_BLOCKS; j++) {
                        PART a = ((local const PART *)(query + (j * (DIM / 16) + k) * 128))[lane];
                        UNROLL
                        for (int n = 0; n < EACH; n++) dots[n][j] = MULTIPLY_F16(a, b[n], dots[n][j]);
                    }
                }
            }
            UNROLL
            for (int n = 0; n < EACH; n++) {
                UNROLL
                for (int j = 0; j < M_BLOCKS; j++) {
                    int8 there = (int8)(p0 + n * SG + lane) <= ((local const int8 *)seen)[j];
                    float each[8];
                    vstore8(select((float8)(-INFINITY), dots[n][j], there), 0, each);
                    UNROLL
                    for (int i = 0; i < 8; i++) score[(j * 8 + i) * PITCH + part * 16 + n * SG + lane] = each[i];
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int i = 0; i < ROWS_EACH; i++) {
                int r = i * SUB_GROUPS + part;
                float s[KEYS / SG], top = largest[i];
                UNROLL
                for (int k = 0; k < KEYS / SG; k++) {
                    s[k] = score[r * PITCH + k * SG + lane];
                    top = fmax(top, s[k]);
                }
                top = sub_group_reduce_max(top);
                float correction = native_exp(largest[i] - top);
                largest[i] = top;
                total[i] *= correction;
                UNROLL
                for (int k = 0; k < KEYS / SG; k++) {
                    float w = native_exp(s[k] - top);
                    total[i] += w;
                    weight[TILED(i * SUB_GROUPS, k * SG, KEYS / 16) + own] = (half)w;
                }
                if (lane == 0) scale[r] = correction;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int j = 0; j < M_BLOCKS; j++) {
                float8 by = ((local const float8 *)scale)[j];
                UNROLL
                for (int n = 0; n < EACH; n++) sums[n][j] *= by;
            }
            for (int k = 0; k < min(KEYS / 16, (length - start + 15) / 16); k++) {
                int p = start + k * 16;
                global const ushort *from = values + place(table, p, kv_head, kv_heads) + part * 16;
                uint row[16], pairs[EACH][8];
                UNROLL
                for (int i = 0; i < 16; i++) row[i] = ((global const COLUMNS *)(from + min(i, length - 1 - p) * kv_heads * DIM))[lane];
                UNROLL
                for (int i = 0; i < 8; i++) {
                    pairs[0][i] = (row[2 * i] & 0xffff) | row[2 * i + 1] << 16;
                    if (EACH > 1) pairs[EACH - 1][i] = row[2 * i] >> 16 | (row[2 * i + 1] & 0xffff0000u);
                }
                UNROLL
                for (int j = 0; j < M_BLOCKS; j++) {
                    PART a = ((local const PART *)(weight + (j * (KEYS / 16) + k) * 128))[lane];
                    UNROLL
                    for (int n = 0; n < EACH; n++) sums[n][j] = MULTIPLY_F16(a, as_int8(vload8(0, pairs[n])), sums[n][j]);
                }
            }
        }
        first = last;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL
    for (int i = 0; i < ROWS_EACH; i++) {
        float sum = sub_group_reduce_add(total[i]);
        if (lane == 0) scale[i * SUB_GROUPS + part] = sum;
    }
    UNROLL
    for (int j = 0; j < M_BLOCKS; j++) {
        UNROLL
        for (int n = 0; n < EACH; n++) {
            float each[8];
            vstore8(sums[n][j], 0, each);
            UNROLL
            for (int i = 0; i < 8; i++) score[(j * 8 + i) * PITCH + part * 16 + lane * EACH + n] = each[i];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < QUERIES * DIM; i += WG) {
        int r = i / DIM, d = i % DIM, m = m0 + r / HEAD_GROUP;
        if (r < TOKENS * HEAD_GROUP && m < most)
            out[((size_t)m * heads + kv_head * HEAD_GROUP + r % HEAD_GROUP) * DIM + d] = score[r * PITCH + d] / scale[r];
    }
}
