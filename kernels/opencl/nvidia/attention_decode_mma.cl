// attention_decode over an f16 cache on the matrix units. Grid: [key/value heads, tokens, SPLITS]. The work-group that finishes last
// for a token and key/value head merges the splits.
#include "nvidia/warps.clh"

#define THREADS (WARPS * WARP)
#define AT_ONCE (SPLITS < 8 ? SPLITS : 8) /* log2 of the splits, whose number is a power of two */
#include "nvidia/attention_split.clh"

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void attention_decode_mma(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global KV *keys, global KV *values, global const float *cosines, global const float *sines, global const float *q_norm,
    global const float *k_norm, float norm_eps, global float *out, volatile global float *parts, volatile global int *arrivals, int heads, int kv_heads) {
    local float warp_sums[WARPS][HEAD_GROUP][DIM];
    local float warp_max[WARPS][8], warp_total[WARPS][8];
    local int last;
    int kv_head = get_group_id(0), m = get_group_id(1), split = get_group_id(2), item = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    global const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int span = ((length + TILE - 1) / TILE + SPLITS - 1) / SPLITS * TILE;
    int begin = split * span, end = min(length, begin + span);

    global const float *row = qkv + (size_t)m * (heads + 2 * kv_heads) * DIM;
    uint4 key[2][DIM_CHUNKS], value[4][HALVES];
    fetch_cached(key, value, table, begin + item / WARP * TILE, STORED(end), (global const ushort *)keys, (global const ushort *)values,
                 kv_heads, kv_head);
    attend(key, value, table, length, begin, end, row, (global ushort *)keys, (global ushort *)values, cosines, sines,
           HEAD_NORMS_OF(q_norm, k_norm, norm_eps) heads, kv_heads, kv_head, warp_sums, warp_max, warp_total);
    barrier(CLK_LOCAL_MEM_FENCE);
    global float *result = out + ((size_t)m * heads + kv_head * HEAD_GROUP) * DIM;
    volatile global float *first = parts + ((size_t)m * kv_heads + kv_head) * SPLITS * PART;
    merge_warps(SPLITS == 1 ? (volatile global float *)result : first + split * PART, SPLITS == 1, warp_sums, warp_max, warp_total);
#if SPLITS > 1
    fence();
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0) {
        volatile global int *arrived = arrivals + m * kv_heads + kv_head;
        last = atomic_inc(arrived) == SPLITS - 1;
        if (last) *arrived = 0;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (!last) return;
    fence();
    for (int i = item; i < HEAD_GROUP * DIM; i += THREADS) {
        float sum = 0.0f, weight = 0.0f, top = LOWEST;
        for (int s = 0; s < SPLITS; s += AT_ONCE) {
            float before = top, found[AT_ONCE], tops[AT_ONCE], weights[AT_ONCE];
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) {
                volatile global float *part = first + (s + j) * PART;
                found[j] = part[i];
                tops[j] = part[HEAD_GROUP * DIM + i / DIM];
                weights[j] = part[HEAD_GROUP * (DIM + 1) + i / DIM];
            }
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) top = fmax(top, tops[j]);
            sum *= power(before - top);
            weight *= power(before - top);
            UNROLL
            for (int j = 0; j < AT_ONCE; j++) {
                float scale = power(tops[j] - top);
                sum += found[j] * scale;
                weight += weights[j] * scale;
            }
        }
        result[i] = sum / weight;
    }
#endif
}
