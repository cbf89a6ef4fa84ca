// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q heads, k heads, v heads).
// NORMS_LAST: heads of q and k are normed after their rotation.
#include "cache_rows.clh"

#define MAX_WG 32 /* work-items of a work-group, at most */
#if NORMS_LAST
#define NORM_ARGS , global const float *q_norm, global const float *k_norm, float eps
#define NORMED(v, i) ((v) * norm[i] / root)
#else
#define NORM_ARGS
#define NORMED(v, i) (v)
#endif
#define KEY(i) NORMED(rotated(row, cosines, sines, position, i), i)

kernel void rope_append(global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                        global float *qkv, global KV *keys, global KV *values, global const float *cosines,
                        global const float *sines, int heads, int kv_heads NORM_ARGS) {
    // Tokens past the last repeat it without effect: see sample.cl.
    int group = get_group_id(0), last = STEP_TOKENS(step) - 1, m = min(group, last), head = get_group_id(1);
    if (group > last) return;
    int position = token_position(step, token_seq, seq_begin, seq_len, m);
    global float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    int block = step[block_table + step[token_seq + m] * max_blocks + position / BLOCK];
    int kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    size_t place = KV_ROW(block, position, kv_heads, kv_head);
#if KV_I8 || NORMS_LAST
    local float2 scratch[MAX_WG];
#endif
#if NORMS_LAST
    global const float *norm = head < heads ? q_norm : k_norm;
    float squares = 0.0f;
    for (int i = get_local_id(0); i < PAIRS; i += get_local_size(0)) {
        float2 pair = rotated_pair(row, cosines, sines, position, i);
        squares += pair.x * pair.x + pair.y * pair.y;
    }
    for (int i = 2 * PAIRS + get_local_id(0); i < DIM; i += get_local_size(0)) squares += row[i] * row[i];
    float root = sqrt(group_sum(squares, scratch) / DIM + eps);
#endif
#if KV_I8
    if (head >= heads) {
        int key = head < heads + kv_heads;
        global char *cache = key ? keys : values;
        float greatest = 0.0f;
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0))
            greatest = fmax(greatest, kv_magnitude(key ? KEY(i) : row[i]));
        greatest = group_max(greatest, scratch);
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0))
            cache[place + i] = kv_code(key ? KEY(i) : row[i], greatest);
        if (get_local_id(0) == 0) KV_SCALE(cache, block, position, kv_heads, kv_head) = kv_scale(greatest);
        return;
    }
#else
    if (head >= heads + kv_heads) {
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0)) STORE_KV(row[i], values, place + i);
        return;
    }
    if (head >= heads)
        for (int i = 2 * PAIRS + get_local_id(0); i < DIM; i += get_local_size(0)) STORE_KV(NORMED(row[i], i), keys, place + i);
#endif
#if NORMS_LAST
    if (head < heads)
        for (int i = 2 * PAIRS + get_local_id(0); i < DIM; i += get_local_size(0)) row[i] = NORMED(row[i], i);
#endif
    for (int i = get_local_id(0); i < PAIRS; i += get_local_size(0)) {
#if NEOX
        int first = i, second = i + PAIRS;
#else
        int first = 2 * i, second = 2 * i + 1;
#endif
        float2 pair = rotated_pair(row, cosines, sines, position, i);
        if (head < heads) {
            row[first] = NORMED(pair.x, first);
            row[second] = NORMED(pair.y, second);
        }
#if !KV_I8
        else {
            STORE_KV(NORMED(pair.x, first), keys, place + first);
            STORE_KV(NORMED(pair.y, second), keys, place + second);
        }
#endif
    }
}
