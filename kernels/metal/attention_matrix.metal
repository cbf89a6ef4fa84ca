// Attention of many tokens over the paged cache, like attention_prefill.metal, on 8 by 8 matrices of floats. Each of four simdgroups
// has eight of a tile's QUERIES rows, and keeps their queries and sums in registers. Keys and values share threadgroup memory
// in turn, KEYS positions at a time. DIM is a multiple of 8.
#define QUERIES 32
#define KEYS 32
#define TOKENS (QUERIES / HEAD_GROUP)
#define VECTORS (DIM / 4)
#define PARTS (DIM / 8)
#define PITCH (DIM + 8) /* floats of a row in threadgroup memory, so that neighbours fall into different banks */
#define SCORE_PITCH (KEYS + 8)
#define THREADS 128
#define TEAM 4 /* threads share a row's softmax */
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

// Positions from `start` on, the last one again past the end.
inline void fetch(threadgroup float *tile, device const KV *cache, device const int *table, int start, int length, int kv_heads,
                  int kv_head, Place place) {
    for (int i = place.item; i < KEYS * VECTORS; i += THREADS) {
        ulong at = cache_place(table, min(start + i / VECTORS, length - 1), kv_heads, kv_head) + ulong(i % VECTORS * 4);
        *(threadgroup float4 *)(tile + i / VECTORS * PITCH + i % VECTORS * 4) = float4(*(device const KV4 *)(cache + at));
    }
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attention_matrix(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &seq_len [[buffer(3)]], constant int &block_table [[buffer(4)]], constant int &max_blocks [[buffer(5)]],
    device const float *qkv [[buffer(6)]], device const KV *keys [[buffer(7)]], device const KV *values [[buffer(8)]],
    device float *out [[buffer(9)]], constant int &heads [[buffer(10)]], constant int &kv_heads [[buffer(11)]], PLACE) {
    threadgroup float4 memory[QUERIES * PITCH / 4];  // the queries, then keys and values in turn, then the output
    threadgroup float score[QUERIES * SCORE_PITCH], diagonal[QUERIES * 8];
    threadgroup float *tile = (threadgroup float *)memory;
    Place place = PLACED;
    int kv_head = int(group.x), m0 = int(group.y) * TOKENS, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int most = min(m0 + TOKENS, tokens), columns = (heads + 2 * kv_heads) * VECTORS;
    for (int i = place.item; i < QUERIES * VECTORS; i += THREADS) {
        int r = i / VECTORS, m = m0 + r / HEAD_GROUP;
        float4 q = float4(0.0f);
        if (r < TOKENS * HEAD_GROUP && m < most)
            q = ((device const float4 *)
                     qkv)[ulong(m) * ulong(columns) + ulong((kv_head * HEAD_GROUP + r % HEAD_GROUP) * VECTORS + i % VECTORS)];
        *(threadgroup float4 *)(tile + r * PITCH + i % VECTORS * 4) = q / precise::sqrt(float(DIM));
    }
    for (int i = place.item; i < QUERIES * 8; i += THREADS) diagonal[i] = 0.0f;
    GROUP_BARRIER;
    int mine = 8 * place.simdgroup;  // the first row of this simdgroup
    simdgroup_float8x8 query[PARTS], sums[PARTS];
    for (int d = 0; d < PARTS; d++) {
        simdgroup_load(query[d], tile + mine * PITCH + 8 * d, PITCH);
        sums[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    int row = mine + place.lane / TEAM, team = place.lane % TEAM, token = m0 + row / HEAD_GROUP;
    float largest = LOWEST, total = 0.0f;  // of `row`; the total of this thread's part of it

    for (int first = m0; first < most;) {  // a sequence's tokens `first` to `last - 1` of the tile
        int seq = step[token_seq + first], last = min(most, step[seq_begin + seq + 1]);
        device const int *table = step + block_table + seq * max_blocks;
        int length = token_position(step, token_seq, seq_begin, seq_len, last - 1) + 1, offset = length - last;
        int seen = token >= first && token < last ? offset + token : -1;  // the last position that `row` attends to
        for (int start = WINDOW_BEGIN(offset + first + 1); start < length; start += KEYS) {
            GROUP_BARRIER;
            fetch(tile, keys, table, start, length, kv_heads, kv_head, place);
            GROUP_BARRIER;
            for (int j = 0; j < KEYS; j += 8) {
                simdgroup_float8x8 key, dots = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (int d = 0; d < PARTS; d++) {
                    simdgroup_load(key, tile + j * PITCH + 8 * d, PITCH, ulong2(0, 0), true);
                    simdgroup_multiply_accumulate(dots, query[d], key, dots);
                }
                simdgroup_store(dots, score + mine * SCORE_PITCH + j, SCORE_PITCH);
            }
            GROUP_BARRIER;
            fetch(tile, values, table, start, length, kv_heads, kv_head, place);
            float of_row[KEYS / TEAM], top = largest;
            for (int i = 0; i < KEYS / TEAM; i++) {
                int at = team + TEAM * i;
                of_row[i] = start + at <= seen && start + at >= WINDOW_BEGIN(seen + 1) ? score[row * SCORE_PITCH + at] : -INFINITY;
                top = fmax(top, of_row[i]);
            }
            for (ushort apart = 1; apart < TEAM; apart *= 2) top = fmax(top, simd_shuffle_xor(top, apart));
            float correction = precise::exp(largest - top);
            largest = top;
            total *= correction;
            for (int i = 0; i < KEYS / TEAM; i++) {
                float w = precise::exp(of_row[i] - top);
                score[row * SCORE_PITCH + team + TEAM * i] = w;
                total += w;
            }
            if (team == 0) diagonal[row * 8 + row % 8] = correction;
            GROUP_BARRIER;
            simdgroup_float8x8 scale, weight, value;
            simdgroup_load(scale, diagonal + mine * 8, 8);
            for (int d = 0; d < PARTS; d++) simdgroup_multiply(sums[d], scale, sums[d]);
            for (int j = 0; j < KEYS; j += 8) {
                simdgroup_load(weight, score + mine * SCORE_PITCH + j, SCORE_PITCH);
                for (int d = 0; d < PARTS; d++) {
                    simdgroup_load(value, tile + j * PITCH + 8 * d, PITCH);
                    simdgroup_multiply_accumulate(sums[d], weight, value, sums[d]);
                }
            }
        }
        first = last;
    }
    for (ushort apart = 1; apart < TEAM; apart *= 2) total += simd_shuffle_xor(total, apart);
    GROUP_BARRIER;
    for (int d = 0; d < PARTS; d++) simdgroup_store(sums[d], tile + mine * PITCH + 8 * d, PITCH);
    if (team == 0) score[row] = total;
    GROUP_BARRIER;
    for (int i = place.item; i < QUERIES * VECTORS; i += THREADS) {
        int r = i / VECTORS, m = m0 + r / HEAD_GROUP;
        if (r < TOKENS * HEAD_GROUP && m < most)
            ((device float4 *)out)[(ulong(m) * ulong(heads) + ulong(kv_head * HEAD_GROUP + r % HEAD_GROUP)) * VECTORS + ulong(i % VECTORS)] =
                *(threadgroup float4 *)(tile + r * PITCH + i % VECTORS * 4) / score[r];
    }
}
