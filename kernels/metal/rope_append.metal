// Rotates q in place, stores rotated k, and v, in the cache. One threadgroup per token and head (q heads, k heads, v heads).
// NORMS_LAST: heads of q and k are normed after their rotation.
#include "cache_rows.metal"
#if NORMS_LAST
#define NORMS device const float *q_norm [[buffer(13)]], device const float *k_norm [[buffer(14)]], constant float &eps [[buffer(15)]],
#define NORMED(v, i) ((v) * norm[i] / root)
#else
#define NORMS
#define NORMED(v, i) (v)
#endif
#define KEY(i) NORMED(rotated(row, cosines, sines, position, i), i)

[[kernel, max_total_threads_per_threadgroup(WG)]] void rope_append(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &seq_len [[buffer(3)]], constant int &block_table [[buffer(4)]], constant int &max_blocks [[buffer(5)]],
    device float *qkv [[buffer(6)]], device KV *keys [[buffer(7)]], device KV *values [[buffer(8)]],
    device const float *cosines [[buffer(9)]], device const float *sines [[buffer(10)]], constant int &heads [[buffer(11)]],
    constant int &kv_heads [[buffer(12)]], NORMS PLACE) {
    int m = int(group.x), head = int(group.y);
    if (m >= STEP_TOKENS(step)) return;
    int position = token_position(step, token_seq, seq_begin, seq_len, m);
    device float *row = qkv + (ulong(m) * ulong(heads + 2 * kv_heads) + ulong(head)) * DIM;
    int kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    ulong at = head < heads ? 0 : cache_place(step + block_table + step[token_seq + m] * max_blocks, position, kv_heads, kv_head);
#if KV_I8 || NORMS_LAST
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
#endif
#if NORMS_LAST
    device const float *norm = head < heads ? q_norm : k_norm;
    float squares = 0.0f;
    for (int i = place.item; i < PAIRS; i += WG) {
        float2 pair = rotated_pair(row, cosines, sines, position, i);
        squares += dot(pair, pair);
    }
    for (int i = 2 * PAIRS + place.item; i < DIM; i += WG) squares += row[i] * row[i];
    float root = precise::sqrt(group_sum(squares, scratch, place) / float(DIM) + eps);
#endif
#if KV_I8
    if (head >= heads) {
        bool key = head < heads + kv_heads;
        device KV *cache = key ? keys : values;
        float greatest = 0.0f;
        for (int i = place.item; i < DIM; i += WG)
            greatest = fmax(greatest, kv_magnitude(key ? KEY(i) : row[i]));
        greatest = group_max(greatest, scratch, place);
        for (int i = place.item; i < DIM; i += WG)
            cache[at + ulong(i)] = kv_code(key ? KEY(i) : row[i], greatest);
        if (place.item == 0) {
            ulong scale = scale_place(step + block_table + step[token_seq + m] * max_blocks, position, kv_heads, kv_head);
            *(device float *)(cache + scale) = kv_scale(greatest);
        }
        return;
    }
#else
    if (head >= heads + kv_heads) {
        for (int i = int(index); i < DIM; i += WG) values[at + ulong(i)] = KV(row[i]);
        return;
    }
    if (head >= heads)
        for (int i = 2 * PAIRS + int(index); i < DIM; i += WG) keys[at + ulong(i)] = KV(NORMED(row[i], i));
#endif
#if NORMS_LAST
    if (head < heads)
        for (int i = 2 * PAIRS + int(index); i < DIM; i += WG) row[i] = NORMED(row[i], i);
#endif
    for (int i = int(index); i < PAIRS; i += WG) {
        int first = NEOX ? i : 2 * i, second = NEOX ? i + PAIRS : 2 * i + 1;
        float2 pair = rotated_pair(row, cosines, sines, position, i);
        if (head < heads) {
            row[first] = NORMED(pair.x, first);
            row[second] = NORMED(pair.y, second);
        }
#if !KV_I8
        else {
            keys[at + ulong(first)] = KV(NORMED(pair.x, first));
            keys[at + ulong(second)] = KV(NORMED(pair.y, second));
        }
#endif
    }
}
