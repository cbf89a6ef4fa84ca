// Causal attention of one token and head per work-group, over the paged cache, in chunks of WG positions with a running
// maximum (Milakov and Gimelshein 2018). Work-items first take a position each (scores), then dimensions (values).
#define PER_ITEM ((DIM + WG - 1) / WG)

kernel void attention(global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                      global const float *qkv, global const KV *keys, global const KV *values, global float *out, int heads, int kv_heads) {
    local float query[DIM], weight[WG];
    local float2 scratch[WG];
    local size_t place[WG];
    // Tokens past the last repeat it without effect: see sample.cl.
    int group = get_group_id(0), last = STEP_TOKENS(step) - 1, m = min(group, last), head = get_group_id(1), lane = get_local_id(0);
    if (group > last) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    global const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int kv_head = head / HEAD_GROUP;
    global const float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    for (int i = lane; i < DIM; i += WG) query[i] = row[i] / sqrt((float)DIM);
    float sums[PER_ITEM];
    for (int i = 0; i < PER_ITEM; i++) sums[i] = 0.0f;
    float largest = -INFINITY, total = 0.0f;
    for (int start = WINDOW_BEGIN(length); start < length; start += WG) {
        barrier(CLK_LOCAL_MEM_FENCE);
        int p = start + lane;
        float score = -INFINITY;
        if (p < length) {
            size_t at = KV_ROW(table[p / BLOCK], p, kv_heads, kv_head);
            place[lane] = at;
            score = 0.0f;
            for (int i = 0; i < DIM; i++) score += query[i] * LOAD_KV(keys, at + i);
            score *= KV_SCALE(keys, table[p / BLOCK], p, kv_heads, kv_head);
        }
        float before = largest;
        largest = fmax(largest, group_max(score, scratch));
        float w = exp(score - largest), correction = exp(before - largest);
        weight[lane] = p < length ? w * KV_SCALE(values, table[p / BLOCK], p, kv_heads, kv_head) : 0.0f;
        total = total * correction + group_sum(w, scratch);  // its barriers publish `weight` and `place`
        int count = min(WG, length - start);
        for (int d = 0; d < PER_ITEM; d++) {
            int i = lane + d * WG;
            if (i >= DIM) break;
            float sum = sums[d] * correction;
            for (int t = 0; t < count; t++) sum += weight[t] * LOAD_KV(values, place[t] + i);
            sums[d] = sum;
        }
    }
    for (int d = 0; d < PER_ITEM; d++) {
        int i = lane + d * WG;
        if (i < DIM) out[((size_t)m * heads + head) * DIM + i] = sums[d] / total;
    }
}
