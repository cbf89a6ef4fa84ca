// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q heads, k heads, v heads).
// Cache: [blocks, BLOCK, kv_heads, DIM].
kernel void rope_append(global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                        global float *qkv, global KV *keys, global KV *values, global const float *cosines,
                        global const float *sines, int heads, int kv_heads) {
    int m = get_group_id(0), head = get_group_id(1);
    if (m >= STEP_TOKENS(step)) return;
    int position = token_position(step, token_seq, seq_begin, seq_len, m);
    global float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    int block = step[block_table + step[token_seq + m] * max_blocks + position / BLOCK];
    int kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    size_t place = (((size_t)block * BLOCK + position % BLOCK) * kv_heads + kv_head) * DIM;
    if (head >= heads + kv_heads) {
        for (int i = get_local_id(0); i < DIM; i += get_local_size(0)) STORE_KV(row[i], values, place + i);
        return;
    }
    for (int i = get_local_id(0); i < DIM / 2; i += get_local_size(0)) {
#if NEOX
        int first = i, second = i + DIM / 2;
#else
        int first = 2 * i, second = 2 * i + 1;
#endif
        float c = cosines[(size_t)position * (DIM / 2) + i], s = sines[(size_t)position * (DIM / 2) + i];
        float a = row[first], b = row[second];
        float rotated_a = a * c - b * s, rotated_b = b * c + a * s;
        if (head < heads) {
            row[first] = rotated_a;
            row[second] = rotated_b;
        } else {
            STORE_KV(rotated_a, keys, place + first);
            STORE_KV(rotated_b, keys, place + second);
        }
    }
}
