// Attention of many tokens, over the paged cache: a tile of QUERIES rows, each a token and one of the query heads of a key/value
// head, against KEYS positions at a time in threadgroup memory, with a running maximum (Milakov and Gimelshein 2018).
// Grid: [key/value heads, tiles of TOKENS tokens]. A tile that holds the ends of several sequences takes them one after the other.
#define QUERIES 32
#define KEYS 32
#define TOKENS (QUERIES / HEAD_GROUP)
#define VECTORS (DIM / 4)
#define PITCH (VECTORS + 1) /* vectors of a row in threadgroup memory, so that neighbours fall into different banks */
#define THREADS 256
#define SIDE 16 /* SIDE * SIDE threads make a square of scores, 2 by 2 each */
#define TEAM 8  /* threads share a row's softmax */
#define LINES 32 /* threads share the dimensions of a row of out, 4 rows each */
#define EACH_D ((VECTORS + LINES - 1) / LINES)
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_prefill(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &seq_len [[buffer(3)]], constant int &block_table [[buffer(4)]], constant int &max_blocks [[buffer(5)]],
    device const float *qkv [[buffer(6)]], device const KV *keys [[buffer(7)]], device const KV *values [[buffer(8)]],
    device float *out [[buffer(9)]], constant int &heads [[buffer(10)]], constant int &kv_heads [[buffer(11)]], PLACE) {
    threadgroup float4 query[QUERIES * PITCH];
    threadgroup KV4 cached[KEYS * PITCH];
    threadgroup float score[QUERIES][KEYS + 1], team_part[QUERIES][TEAM], scale[QUERIES];
#if KV_I8
    threadgroup float units[KEYS];  // of keys, then of values
#endif
    int item = int(index), kv_head = int(group.x), m0 = int(group.y) * TOKENS, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int most = min(m0 + TOKENS, tokens), columns = (heads + 2 * kv_heads) * VECTORS;
    for (int i = item; i < QUERIES * VECTORS; i += THREADS) {
        int r = i / VECTORS, m = m0 + r / HEAD_GROUP;
        float4 q = float4(0.0f);
        if (r < TOKENS * HEAD_GROUP && m < most)
            q = ((device const float4 *)
                     qkv)[ulong(m) * ulong(columns) + ulong((kv_head * HEAD_GROUP + r % HEAD_GROUP) * VECTORS + i % VECTORS)];
        query[r * PITCH + i % VECTORS] = q / precise::sqrt(float(DIM));
    }
    int sx = item % SIDE, sy = item / SIDE, row = item / TEAM, team = item % TEAM, line = item % LINES, first_row = item / LINES;
    float largest = LOWEST, total = 0.0f;  // of `row`; the total of this thread's part of it
    float4 sums[4][EACH_D];                // of rows first_row + 8 i
    for (int i = 0; i < 4; i++)
        for (int d = 0; d < EACH_D; d++) sums[i][d] = float4(0.0f);

    for (int first = m0; first < most;) {  // a sequence's tokens `first` to `last - 1` of the tile
        int seq = step[token_seq + first], last = min(most, step[seq_begin + seq + 1]);
        device const int *table = step + block_table + seq * max_blocks;
        int length = token_position(step, token_seq, seq_begin, seq_len, last - 1) + 1, offset = length - last;
        for (int start = WINDOW_BEGIN(offset + first + 1); start < length; start += KEYS) {
            GROUP_BARRIER;
            for (int i = item; i < KEYS * VECTORS; i += THREADS) {
                ulong at = cache_place(table, min(start + i / VECTORS, length - 1), kv_heads, kv_head);
                cached[i / VECTORS * PITCH + i % VECTORS] = *(device const KV4 *)(keys + at + ulong(i % VECTORS * 4));
            }
#if KV_I8
            if (item < KEYS) units[item] = scale_at(keys, scale_place(table, min(start + item, length - 1), kv_heads, kv_head));
#endif
            GROUP_BARRIER;
            float dots[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
            for (int k = 0; k < VECTORS; k++) {
                float4 a = query[sy * PITCH + k], b = query[(sy + SIDE) * PITCH + k];
                float4 c = float4(cached[sx * PITCH + k]), d = float4(cached[(sx + SIDE) * PITCH + k]);
                dots[0][0] += dot(a, c);
                dots[0][1] += dot(a, d);
                dots[1][0] += dot(b, c);
                dots[1][1] += dot(b, d);
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 2; j++) {
                    int m = m0 + (sy + SIDE * i) / HEAD_GROUP, p = start + sx + SIDE * j;
#if KV_I8
                    dots[i][j] *= units[sx + SIDE * j];
#endif
                    bool seen = m >= first && m < last && p <= offset + m && p >= WINDOW_BEGIN(offset + m + 1);
                    score[sy + SIDE * i][sx + SIDE * j] = seen ? dots[i][j] : -INFINITY;
                }
            }
            GROUP_BARRIER;
            for (int i = item; i < KEYS * VECTORS; i += THREADS) {
                ulong at = cache_place(table, min(start + i / VECTORS, length - 1), kv_heads, kv_head);
                cached[i / VECTORS * PITCH + i % VECTORS] = *(device const KV4 *)(values + at + ulong(i % VECTORS * 4));
            }
#if KV_I8
            if (item < KEYS) units[item] = scale_at(values, scale_place(table, min(start + item, length - 1), kv_heads, kv_head));
#endif
            float top = LOWEST;
            for (int i = 0; i < KEYS / TEAM; i++) top = fmax(top, score[row][team + TEAM * i]);
            team_part[row][team] = top;
            GROUP_BARRIER;
            top = largest;
            for (int i = 0; i < TEAM; i++) top = fmax(top, team_part[row][i]);
            float correction = precise::exp(largest - top);
            largest = top;
            total *= correction;
            for (int i = 0; i < KEYS / TEAM; i++) {
                float w = precise::exp(score[row][team + TEAM * i] - top);
                total += w;
#if KV_I8
                w *= units[team + TEAM * i];
#endif
                score[row][team + TEAM * i] = w;
            }
            if (team == 0) scale[row] = correction;
            GROUP_BARRIER;
            for (int i = 0; i < 4; i++)
                for (int d = 0; d < EACH_D; d++) sums[i][d] *= scale[first_row + 8 * i];
            for (int t = 0; t < KEYS; t++) {
                for (int d = 0; d < EACH_D; d++) {
                    float4 value = float4(cached[t * PITCH + min(line + LINES * d, VECTORS - 1)]);
                    for (int i = 0; i < 4; i++) sums[i][d] += score[first_row + 8 * i][t] * value;
                }
            }
        }
        first = last;
    }
    GROUP_BARRIER;
    team_part[row][team] = total;
    GROUP_BARRIER;
    for (int i = 0; i < 4; i++) {
        int r = first_row + 8 * i, m = m0 + r / HEAD_GROUP;
        float sum = 0.0f;
        for (int t = 0; t < TEAM; t++) sum += team_part[r][t];
        for (int d = 0; d < EACH_D; d++) {
            int v = line + LINES * d;
            if (r < TOKENS * HEAD_GROUP && m < most && v < VECTORS)
                ((device float4 *)out)[(ulong(m) * ulong(heads) + ulong(kv_head * HEAD_GROUP + r % HEAD_GROUP)) * VECTORS + ulong(v)] =
                    sums[i][d] / sum;
        }
    }
}
