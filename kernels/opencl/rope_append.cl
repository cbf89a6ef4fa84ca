// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q heads, k heads, v heads).
#include "cache_rows.clh"

#define MAX_WG 32 /* work-items of a work-group, at most */

kernel void rope_append(global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                        global float *qkv, global KV *keys, global KV *values, global const float *cosines,
                        global const float *sines, int heads, int kv_heads) {
    // Tokens past the last repeat it without effect: see sample.cl.
    int group = get_group_id(0), last = STEP_TOKENS(step) - 1, m = min(group, last), head = get_group_id(1);
    if (group > last) return;
    int position = token_position(step, token_seq, seq_begin, seq_len, m);
    global float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    int block = step[block_table + step[token_seq + m] * max_blocks + position / BLOCK];
    int kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    size_t place = KV_ROW(block, position, kv_heads, kv_head);
#if KV_I8
    local float2 scratch[MAX_WG];
    if (head >= heads) {
        int key = head < heads + kv_heads;
        global char *cache = key ? keys : values;
        float greatest = 0.0f;
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0))
            greatest = fmax(greatest, kv_magnitude(key ? rotated(row, cosines, sines, position, i) : row[i]));
        greatest = group_max(greatest, scratch);
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0))
            cache[place + i] = kv_code(key ? rotated(row, cosines, sines, position, i) : row[i], greatest);
        if (get_local_id(0) == 0) KV_SCALE(cache, block, position, kv_heads, kv_head) = kv_scale(greatest);
        return;
    }
#else
    if (head >= heads + kv_heads) {
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0)) STORE_KV(row[i], values, place + i);
        return;
    }
    if (head >= heads)
        for (int i = 2 * PAIRS + get_local_id(0); i < DIM; i += get_local_size(0)) STORE_KV(row[i], keys, place + i);
#endif
    for (int i = get_local_id(0); i < PAIRS; i += get_local_size(0)) {
#if NEOX
        int first = i, second = i + PAIRS;
#else
        int first = 2 * i, second = 2 * i + 1;
#endif
        float c = cosines[(size_t)position * PAIRS + i], s = sines[(size_t)position * PAIRS + i];
        float a = row[first], b = row[second];
        float rotated_a = a * c - b * s, rotated_b = b * c + a * s;
        if (head < heads) {
            row[first] = rotated_a;
            row[second] = rotated_b;
        }
#if !KV_I8
        else {
            STORE_KV(rotated_a, keys, place + first);
            STORE_KV(rotated_b, keys, place + second);
        }
#endif
    }
}
