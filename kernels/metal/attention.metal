// Causal attention of one token and head per threadgroup, over the paged cache, in chunks of WG positions with a running
// maximum (Milakov and Gimelshein 2018). Threads first take a position each (scores), then dimensions (values).
#define PER_ITEM ((DIM + WG - 1) / WG)

[[kernel, max_total_threads_per_threadgroup(WG)]] void attention(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &seq_len [[buffer(3)]], constant int &block_table [[buffer(4)]], constant int &max_blocks [[buffer(5)]],
    device const float *qkv [[buffer(6)]], device const KV *keys [[buffer(7)]], device const KV *values [[buffer(8)]],
    device float *out [[buffer(9)]], constant int &heads [[buffer(10)]], constant int &kv_heads [[buffer(11)]], PLACE) {
    threadgroup float query[DIM], weight[WG];
    threadgroup float2 scratch[SIMDGROUPS];
    threadgroup ulong cached[WG];
#if KV_I8
    threadgroup float units[WG];  // of values
#endif
    Place place = PLACED;
    int m = int(group.x), head = int(group.y), lane = place.item;
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    device const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int kv_head = head / HEAD_GROUP;
    device const float *row = qkv + (ulong(m) * ulong(heads + 2 * kv_heads) + ulong(head)) * DIM;
    for (int i = lane; i < DIM; i += WG) query[i] = row[i] / precise::sqrt(float(DIM));
    float sums[PER_ITEM];
    for (int i = 0; i < PER_ITEM; i++) sums[i] = 0.0f;
    float largest = -INFINITY, total = 0.0f;
    for (int start = WINDOW_BEGIN(length); start < length; start += WG) {
        GROUP_BARRIER;
        int p = start + lane;
        float score = -INFINITY;
        if (p < length) {
            ulong at = cache_place(table, p, kv_heads, kv_head);
            cached[lane] = at;
            score = 0.0f;
            for (int i = 0; i < DIM; i++) score += query[i] * float(keys[at + ulong(i)]);
#if KV_I8
            ulong scale = scale_place(table, p, kv_heads, kv_head);
            score *= scale_at(keys, scale);
            units[lane] = scale_at(values, scale);
#endif
        }
        float before = largest;
        largest = fmax(largest, group_max(score, scratch, place));
        float w = precise::exp(score - largest), correction = precise::exp(before - largest);
        weight[lane] = w;
        total = total * correction + group_sum(w, scratch, place);  // its barriers publish `weight` and `cached`
        int count = min(WG, length - start);
        for (int d = 0; d < PER_ITEM; d++) {
            int i = lane + d * WG;
            if (i >= DIM) break;
            float sum = sums[d] * correction;
#if KV_I8
            for (int t = 0; t < count; t++) sum += weight[t] * units[t] * float(values[cached[t] + ulong(i)]);
#else
            for (int t = 0; t < count; t++) sum += weight[t] * float(values[cached[t] + ulong(i)]);
#endif
            sums[d] = sum;
        }
    }
    for (int d = 0; d < PER_ITEM; d++) {
        int i = lane + d * WG;
        if (i < DIM) out[(ulong(m) * ulong(heads) + ulong(head)) * DIM + ulong(i)] = sums[d] / total;
    }
}
