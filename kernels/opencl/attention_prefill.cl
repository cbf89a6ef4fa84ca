// Attention of many tokens, over the paged cache: a tile of QUERIES rows, each a token and one of the query heads of a key/value
// head, against KEYS positions at a time in local memory, with a running maximum (Milakov and Gimelshein 2018).
// Grid: [key/value heads, tiles of TOKENS tokens]. A tile that holds the ends of several sequences takes them one after the other.
#define QUERIES 32
#define KEYS 32
#define TOKENS (QUERIES / HEAD_GROUP)
#define VECTORS (DIM / 4)
#define PITCH (VECTORS + 1) /* float4s of a row in local memory, so that neighbours fall into different banks */
#define WG 256
#define SIDE 16 /* WG = SIDE * SIDE work-items make a square of scores, 2 by 2 each */
#define TEAM 8  /* work-items share a row's softmax */
#define LINES 32 /* work-items share the dimensions of a row of out, 4 rows each */
#define EACH_D ((VECTORS + LINES - 1) / LINES)
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attention_prefill(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global const KV *keys, global const KV *values, global float *out, int heads, int kv_heads) {
    local float4 query[QUERIES * PITCH], cached[KEYS * PITCH];
    local float score[QUERIES][KEYS + 1], team_part[QUERIES][TEAM], scale[QUERIES];
    int item = get_local_id(0), kv_head = get_group_id(0), m0 = get_group_id(1) * TOKENS, tokens = STEP_TOKENS(step);
    // No return where no token is left: PoCL 3.1 lets all work-items into the conditions behind the barriers then.
    int most = min(m0 + TOKENS, tokens), columns = (heads + 2 * kv_heads) * VECTORS;
    for (int i = item; i < QUERIES * VECTORS; i += WG) {
        int r = i / VECTORS, m = m0 + r / HEAD_GROUP;
        float4 q = (float4)(0.0f);
        if (r < TOKENS * HEAD_GROUP && m < most)
            q = ((global const float4 *)qkv)[(size_t)m * columns + (kv_head * HEAD_GROUP + r % HEAD_GROUP) * VECTORS + i % VECTORS];
        query[r * PITCH + i % VECTORS] = q / sqrt((float)DIM);
    }
    int sx = item % SIDE, sy = item / SIDE, row = item / TEAM, team = item % TEAM, line = item % LINES, first_row = item / LINES;
    float largest = LOWEST, total = 0.0f;  // of `row`; the total of this work-item's part of it
    float4 sums[4][EACH_D];                // of rows first_row + 8 i
    UNROLL
    for (int i = 0; i < 4; i++) {
        UNROLL
        for (int d = 0; d < EACH_D; d++) sums[i][d] = (float4)(0.0f);
    }

    for (int first = m0; first < most;) {  // a sequence's tokens `first` to `last - 1` of the tile
        int seq = step[token_seq + first], last = min(most, step[seq_begin + seq + 1]);
        global const int *table = step + block_table + seq * max_blocks;
        int length = token_position(step, token_seq, seq_begin, seq_len, last - 1) + 1, offset = length - last;
        for (int start = WINDOW_BEGIN(offset + first + 1); start < length; start += KEYS) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int i = item; i < KEYS * VECTORS; i += WG) {
                int p = min(start + i / VECTORS, length - 1);
                size_t at = KV_ROW(table[p / BLOCK], p, kv_heads, kv_head);
                float unit = KV_SCALE(keys, table[p / BLOCK], p, kv_heads, kv_head);
                cached[i / VECTORS * PITCH + i % VECTORS] = LOAD_KV4(keys, at + i % VECTORS * 4) * unit;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            float dots[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
            for (int k = 0; k < VECTORS; k++) {
                float4 a = query[sy * PITCH + k], b = query[(sy + SIDE) * PITCH + k];
                float4 c = cached[sx * PITCH + k], d = cached[(sx + SIDE) * PITCH + k];
                dots[0][0] += dot(a, c);
                dots[0][1] += dot(a, d);
                dots[1][0] += dot(b, c);
                dots[1][1] += dot(b, d);
            }
            UNROLL
            for (int i = 0; i < 2; i++) {
                UNROLL
                for (int j = 0; j < 2; j++) {
                    int m = m0 + (sy + SIDE * i) / HEAD_GROUP, p = start + sx + SIDE * j;
                    int seen = m >= first && m < last && p <= offset + m && p >= WINDOW_BEGIN(offset + m + 1);
                    score[sy + SIDE * i][sx + SIDE * j] = seen ? dots[i][j] : -INFINITY;
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int i = item; i < KEYS * VECTORS; i += WG) {
                int p = min(start + i / VECTORS, length - 1);
                size_t at = KV_ROW(table[p / BLOCK], p, kv_heads, kv_head);
                float unit = KV_SCALE(values, table[p / BLOCK], p, kv_heads, kv_head);
                cached[i / VECTORS * PITCH + i % VECTORS] = LOAD_KV4(values, at + i % VECTORS * 4) * unit;
            }
            float top = LOWEST;
            UNROLL
            for (int i = 0; i < KEYS / TEAM; i++) top = fmax(top, score[row][team + TEAM * i]);
            team_part[row][team] = top;
            barrier(CLK_LOCAL_MEM_FENCE);
            top = largest;
            UNROLL
            for (int i = 0; i < TEAM; i++) top = fmax(top, team_part[row][i]);
            float correction = exp(largest - top);
            largest = top;
            total *= correction;
            UNROLL
            for (int i = 0; i < KEYS / TEAM; i++) {
                float w = exp(score[row][team + TEAM * i] - top);
                score[row][team + TEAM * i] = w;
                total += w;
            }
            if (team == 0) scale[row] = correction;
            barrier(CLK_LOCAL_MEM_FENCE);
            UNROLL
            for (int i = 0; i < 4; i++) {
                UNROLL
                for (int d = 0; d < EACH_D; d++) sums[i][d] *= scale[first_row + 8 * i];
            }
            for (int t = 0; t < KEYS; t++) {
                UNROLL
                for (int d = 0; d < EACH_D; d++) {
                    float4 value = cached[t * PITCH + min(line + LINES * d, VECTORS - 1)];
                    UNROLL
                    for (int i = 0; i < 4; i++) sums[i][d] += score[first_row + 8 * i][t] * value;
                }
            }
        }
        first = last;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    team_part[row][team] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL
    for (int i = 0; i < 4; i++) {
        int r = first_row + 8 * i, m = m0 + r / HEAD_GROUP;
        float sum = 0.0f;
        for (int t = 0; t < TEAM; t++) sum += team_part[r][t];
        UNROLL
        for (int d = 0; d < EACH_D; d++) {
            int v = line + LINES * d;
            if (r < TOKENS * HEAD_GROUP && m < most && v < VECTORS)
                vstore4(sums[i][d] / sum, v, out + ((size_t)m * heads + kv_head * HEAD_GROUP + r % HEAD_GROUP) * DIM);
        }
    }
}
