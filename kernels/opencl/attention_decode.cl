// Attention of few tokens over long caches: the positions of a sequence are split over work-groups (flash decoding), and
// attention_merge puts their parts together. Grid: [key/value heads, tokens, splits]; the HEAD_GROUP query heads of a key/value head
// share its reads. Work-items first take a part of a position's dimensions each (scores, with a running maximum as Milakov and
// Gimelshein 2018), then four dimensions of some of the positions (values).
//
// One split writes `out` itself; several write their parts there: DIM sums, a maximum and a total for each token and head.
//
// ROPE: each token is a sequence of its own; rotates its q and k here, and stores k and v in the cache (rope_append's work).
#if INTEL
#define PARTS (DIM % 32 ? DIM % 16 ? 1 : 4 : 8) /* as below: a cache line of f16; with more vectors each, registers spill */
#else
#define PARTS (DIM % 16 ? 1 : 4) /* work-items for a position */
#endif
#define CHUNK (WG / PARTS)
#define VECTORS (DIM / 4)
#define TEAMS (WG / VECTORS) /* of work-items that share the positions of a chunk; those past TEAMS * VECTORS have no values */
#define REDUCERS 8 /* work-items that share the softmax of a head */
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

#if ROPE
#include "cache_rows.clh"
#endif

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attention_decode(
    global const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, global const float *qkv,
    global KV *keys, global KV *values, global const float *cosines, global const float *sines, global float *out, int heads,
    int kv_heads) {
    local float4 query[HEAD_GROUP][VECTORS], team_sums[TEAMS][HEAD_GROUP][VECTORS];
    local float score[HEAD_GROUP][WG], weight[HEAD_GROUP][CHUNK], reduced[HEAD_GROUP][REDUCERS], scale[HEAD_GROUP];
    local size_t place[CHUNK];
#if KV_I8
    local float value_scale[CHUNK];
#endif
    int kv_head = get_group_id(0), m = get_group_id(1), split = get_group_id(2), splits = get_num_groups(2), item = get_local_id(0);
    int there = m < STEP_TOKENS(step);  // not a return: PoCL 3.1 lets all work-items into the last condition then
    if (!there) m = 0;
    int length = there ? token_position(step, token_seq, seq_begin, seq_len, m) + 1 : 0;
    global const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int seen = WINDOW_BEGIN(length), span = (length - seen + splits - 1) / splits, begin = seen + split * span, end = min(length, begin + span);

    global const float *row = qkv + (size_t)m * (heads + 2 * kv_heads) * DIM, *row_q = row + kv_head * HEAD_GROUP * DIM;
    for (int i = item; i < HEAD_GROUP * DIM; i += WG) {
#if ROPE
        float q = rotated(row_q + i / DIM * DIM, cosines, sines, max(length - 1, 0), i % DIM);  // a token that is not there has no length
#else
        float q = row_q[i];
#endif
        ((local float *)query)[i] = q / sqrt((float)DIM);
    }
#if ROPE
    global const float *row_k = row + (heads + kv_head) * DIM, *row_v = row_k + kv_heads * DIM;
#if KV_I8
    local float2 *scratch = (local float2 *)team_sums;  // not in use yet, and room for WG of them
    float top_k = 0.0f, top_v = 0.0f;
    if (begin < end && end == length) {
        for (int i = item; i < DIM; i += WG) {
            top_k = fmax(top_k, kv_magnitude(rotated(row_k, cosines, sines, length - 1, i)));
            top_v = fmax(top_v, kv_magnitude(row_v[i]));
        }
    }
    top_k = group_max(top_k, scratch);
    top_v = group_max(top_v, scratch);
#endif
    if (begin < end && end == length) {
        int p = length - 1, block = table[p / BLOCK];
        size_t at = KV_ROW(block, p, kv_heads, kv_head);
        for (int i = item; i < DIM; i += WG) {
            float key = rotated(row_k, cosines, sines, p, i), value = row_v[i];
#if KV_I8
            keys[at + i] = kv_code(key, top_k);
            values[at + i] = kv_code(value, top_v);
#else
            STORE_KV(key, keys, at + i);
            STORE_KV(value, values, at + i);
#endif
        }
#if KV_I8
        if (item == 0) {
            KV_SCALE(keys, block, p, kv_heads, kv_head) = kv_scale(top_k);
            KV_SCALE(values, block, p, kv_heads, kv_head) = kv_scale(top_v);
        }
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#else
    barrier(CLK_LOCAL_MEM_FENCE);
#endif

    float4 sums[HEAD_GROUP];
    UNROLL
    for (int g = 0; g < HEAD_GROUP; g++) sums[g] = (float4)(0.0f);
    // Head `mine`: the maximum so far, and this work-item's part of the total.
    float largest = LOWEST, total = 0.0f;
    int mine = item / REDUCERS, reducer = item % REDUCERS;
    int team = item / VECTORS, vector = item % VECTORS;
    for (int start = begin; start < end; start += CHUNK) {
        int p = start + item / PARTS, count = min(CHUNK, end - start);
        float dots[HEAD_GROUP];
        UNROLL
        for (int g = 0; g < HEAD_GROUP; g++) dots[g] = 0.0f;
        if (p < end) {
            int block = table[p / BLOCK];
            size_t at = KV_ROW(block, p, kv_heads, kv_head);
            if (item % PARTS == 0) {
                place[item / PARTS] = at;
#if KV_I8
                value_scale[item / PARTS] = KV_SCALE(values, block, p, kv_heads, kv_head);
#endif
            }
            for (int i = 0; i < VECTORS / PARTS; i++) {
                int k = item % PARTS + i * PARTS;
                float4 key = LOAD_KV4(keys, at + 4 * k);
                UNROLL
                for (int g = 0; g < HEAD_GROUP; g++) dots[g] += dot(key, query[g][k]);
            }
#if KV_I8
            float unit = KV_SCALE(keys, block, p, kv_heads, kv_head);
            UNROLL
            for (int g = 0; g < HEAD_GROUP; g++) dots[g] *= unit;
#endif
        }
        UNROLL
        for (int g = 0; g < HEAD_GROUP; g++) score[g][item] = dots[g];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (mine < HEAD_GROUP) {
            float top = LOWEST;
            for (int t = reducer; t < count; t += REDUCERS) {
                float sum = score[mine][t * PARTS];
                for (int i = 1; i < PARTS; i++) sum += score[mine][t * PARTS + i];
                weight[mine][t] = sum;
                top = fmax(top, sum);
            }
            reduced[mine][reducer] = top;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (mine < HEAD_GROUP) {
            float top = largest;
            for (int i = 0; i < REDUCERS; i++) top = fmax(top, reduced[mine][i]);
            float correction = exp(largest - top);
            largest = top;
            total *= correction;
            for (int t = reducer; t < count; t += REDUCERS) {
                float w = exp(weight[mine][t] - top);
#if KV_I8
                weight[mine][t] = w * value_scale[t];
#else
                weight[mine][t] = w;
#endif
                total += w;
            }
            if (reducer == 0) scale[mine] = correction;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (team < TEAMS) {
            UNROLL
            for (int g = 0; g < HEAD_GROUP; g++) sums[g] *= scale[g];
            for (int t = team; t < count; t += TEAMS) {
                float4 value = LOAD_KV4(values, place[t] + 4 * vector);
                UNROLL
                for (int g = 0; g < HEAD_GROUP; g++) sums[g] += weight[g][t] * value;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }

    if (team < TEAMS) {
        UNROLL
        for (int g = 0; g < HEAD_GROUP; g++) team_sums[team][g][vector] = sums[g];
    }
    if (mine < HEAD_GROUP) reduced[mine][reducer] = total;
    if (mine < HEAD_GROUP && reducer == 0) scale[mine] = largest;
    barrier(CLK_LOCAL_MEM_FENCE);
    size_t first_head = (size_t)m * heads + kv_head * HEAD_GROUP;
    if (there) {
        for (int i = item; i < HEAD_GROUP * VECTORS; i += WG) {
            int g = i / VECTORS, v = i % VECTORS;
            float4 sum = team_sums[0][g][v];
            for (int t = 1; t < TEAMS; t++) sum += team_sums[t][g][v];
            float all = 0.0f;
            for (int r = 0; r < REDUCERS; r++) all += reduced[g][r];
            int alone = splits == 1;
            global float *part = out + (alone ? (first_head + g) * DIM : ((first_head + g) * splits + split) * (DIM + 2));
            vstore4(alone ? sum / all : sum, v, part);
            if (v == 0 && !alone) {
                part[DIM] = scale[g];
                part[DIM + 1] = all;
            }
        }
    }
}

// Grid: [heads, tokens].
kernel void attention_merge(global const int *step, global const float *parts, global float *out, int splits) {
    int m = get_group_id(1), heads = get_num_groups(0), head = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float *first = parts + ((size_t)m * heads + head) * splits * (DIM + 2);
    float largest = LOWEST, total = 0.0f;
    for (int s = 0; s < splits; s++) largest = fmax(largest, first[s * (DIM + 2) + DIM]);
    for (int s = 0; s < splits; s++) total += first[s * (DIM + 2) + DIM + 1] * exp(first[s * (DIM + 2) + DIM] - largest);
    for (int i = get_local_id(0); i < DIM; i += get_local_size(0)) {
        float sum = 0.0f;
        for (int s = 0; s < splits; s++) sum += first[s * (DIM + 2) + i] * exp(first[s * (DIM + 2) + DIM] - largest);
        out[((size_t)m * heads + head) * DIM + i] = sum / total;
    }
}
