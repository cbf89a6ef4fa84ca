// Attention of few tokens over long caches: the positions of a sequence are split over threadgroups (flash decoding), and
// attention_merge puts their parts together. Grid: [key/value heads, tokens, splits]; the HEAD_GROUP query heads of a key/value head
// share its reads. A simdgroup has a position at a time: its threads take a part of the dimensions each, four neighbours at once,
// and keep a running maximum (Milakov and Gimelshein 2018) for each head; simdgroups are put together at the end.
//
// One split writes `out` itself; several write their parts there: DIM sums, a maximum and a total for each token and head.
//
// ROPE: each token is a sequence of its own; rotates its q and k here, and stores k and v in the cache (rope_append's work).
#include "cache_rows.metal"
#define VECTORS (DIM / 4)
#define EACH ((VECTORS + 31) / 32) /* vectors of a thread */
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */

[[kernel, max_total_threads_per_threadgroup(WG)]] void attention_decode(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &seq_len [[buffer(3)]], constant int &block_table [[buffer(4)]], constant int &max_blocks [[buffer(5)]],
    device const float *qkv [[buffer(6)]], device KV *keys [[buffer(7)]], device KV *values [[buffer(8)]],
    device const float *cosines [[buffer(9)]], device const float *sines [[buffer(10)]], device float *out [[buffer(11)]],
    constant int &heads [[buffer(12)]], constant int &kv_heads [[buffer(13)]], PLACE) {
    threadgroup float4 query[HEAD_GROUP][VECTORS];
    threadgroup float4 parts[SIMDGROUPS][VECTORS];
    threadgroup float2 found[HEAD_GROUP][SIMDGROUPS];
    Place place = PLACED;
    int kv_head = int(group.x), m = int(group.y), split = int(group.z), splits = int(groups.z);
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    device const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int seen = WINDOW_BEGIN(length), span = (length - seen + splits - 1) / splits, begin = seen + split * span;
    int end = min(length, begin + span);

    device const float *row = qkv + ulong(m) * ulong(heads + 2 * kv_heads) * DIM, *row_q = row + kv_head * HEAD_GROUP * DIM;
    for (int i = place.item; i < HEAD_GROUP * DIM; i += WG) {
#if ROPE
        float q = rotated(row_q + i / DIM * DIM, cosines, sines, length - 1, i % DIM);
#else
        float q = row_q[i];
#endif
        ((threadgroup float *)query)[i] = q / precise::sqrt(float(DIM));
    }
#if ROPE
    if (begin < end && end == length) {
        ulong at = cache_place(table, length - 1, kv_heads, kv_head);
        device const float *row_k = row + (heads + kv_head) * DIM, *row_v = row_k + kv_heads * DIM;
#if KV_I8
        float top_k = 0.0f, top_v = 0.0f;
        for (int i = place.item; i < DIM; i += WG) {
            top_k = fmax(top_k, kv_magnitude(rotated(row_k, cosines, sines, length - 1, i)));
            top_v = fmax(top_v, kv_magnitude(row_v[i]));
        }
        top_k = group_max(top_k, found[0], place);
        top_v = group_max(top_v, found[0], place);
        if (place.item == 0) {
            ulong scale = scale_place(table, length - 1, kv_heads, kv_head);
            *(device float *)(keys + scale) = kv_scale(top_k);
            *(device float *)(values + scale) = kv_scale(top_v);
        }
#endif
        for (int i = place.item; i < DIM; i += WG) {
            float key = rotated(row_k, cosines, sines, length - 1, i), value = row_v[i];
#if KV_I8
            keys[at + ulong(i)] = kv_code(key, top_k);
            values[at + ulong(i)] = kv_code(value, top_v);
#else
            keys[at + ulong(i)] = KV(key);
            values[at + ulong(i)] = KV(value);
#endif
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
#else
    GROUP_BARRIER;
#endif

    float4 sums[HEAD_GROUP][EACH];
    float largest[HEAD_GROUP], total[HEAD_GROUP];
    for (int g = 0; g < HEAD_GROUP; g++) {
        largest[g] = LOWEST;
        total[g] = 0.0f;
        for (int e = 0; e < EACH; e++) sums[g][e] = float4(0.0f);
    }
    for (int p = begin + place.simdgroup; p < end; p += SIMDGROUPS) {
        ulong at = cache_place(table, p, kv_heads, kv_head);
#if KV_I8
        ulong scale = scale_place(table, p, kv_heads, kv_head);
        float key_unit = scale_at(keys, scale), value_unit = scale_at(values, scale);
#else
        const float key_unit = 1.0f, value_unit = 1.0f;
#endif
        float4 key[EACH], value[EACH];
        for (int e = 0; e < EACH; e++) {
            int v = place.lane + 32 * e;
            key[e] = v < VECTORS ? float4(*(device const KV4 *)(keys + at + ulong(4 * v))) : float4(0.0f);
            value[e] = v < VECTORS ? float4(*(device const KV4 *)(values + at + ulong(4 * v))) : float4(0.0f);
        }
        for (int g = 0; g < HEAD_GROUP; g++) {
            float part = 0.0f;
            for (int e = 0; e < EACH; e++) part += dot(key[e], query[g][min(place.lane + 32 * e, VECTORS - 1)]);
            float score = simd_sum(part) * key_unit, top = fmax(largest[g], score);
            float correction = precise::exp(largest[g] - top), w = precise::exp(score - top);
            largest[g] = top;
            total[g] = total[g] * correction + w;
            for (int e = 0; e < EACH; e++) sums[g][e] = sums[g][e] * correction + w * value_unit * value[e];
        }
    }

    ulong first_head = ulong(m) * ulong(heads) + ulong(kv_head * HEAD_GROUP);
    for (int g = 0; g < HEAD_GROUP; g++) {
        if (place.lane == 0) found[g][place.simdgroup] = float2(largest[g], total[g]);
        GROUP_BARRIER;
        float top = LOWEST, all = 0.0f;
        for (int s = 0; s < SIMDGROUPS; s++) top = fmax(top, found[g][s].x);
        for (int s = 0; s < SIMDGROUPS; s++) all += found[g][s].y * precise::exp(found[g][s].x - top);
        float mine = precise::exp(largest[g] - top);
        for (int e = 0; e < EACH; e++) {
            int v = place.lane + 32 * e;
            if (v < VECTORS) parts[place.simdgroup][v] = sums[g][e] * mine;
        }
        GROUP_BARRIER;
        bool alone = splits == 1;
        ulong head = first_head + ulong(g);
        device float *to = out + (alone ? head * DIM : (head * ulong(splits) + ulong(split)) * (DIM + 2));
        for (int i = place.item; i < DIM; i += WG) {
            float sum = 0.0f;
            for (int s = 0; s < SIMDGROUPS; s++) sum += ((threadgroup const float *)parts[s])[i];
            to[i] = alone ? sum / all : sum;
        }
        if (place.item == 0 && !alone) {
            to[DIM] = top;
            to[DIM + 1] = all;
        }
        GROUP_BARRIER;
    }
}

// Grid: [heads, tokens].
[[kernel, max_total_threads_per_threadgroup(WG)]] void attention_merge(
    device const int *step [[buffer(0)]], device const float *parts [[buffer(1)]], device float *out [[buffer(2)]],
    constant int &splits [[buffer(3)]], PLACE) {
    int m = int(group.y), heads = int(groups.x), head = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device const float *first = parts + (ulong(m) * ulong(heads) + ulong(head)) * ulong(splits) * (DIM + 2);
    float largest = LOWEST, total = 0.0f;
    for (int s = 0; s < splits; s++) largest = fmax(largest, first[s * (DIM + 2) + DIM]);
    for (int s = 0; s < splits; s++)
        total += first[s * (DIM + 2) + DIM + 1] * precise::exp(first[s * (DIM + 2) + DIM] - largest);
    for (int i = int(index); i < DIM; i += WG) {
        float sum = 0.0f;
        for (int s = 0; s < splits; s++) sum += first[s * (DIM + 2) + i] * precise::exp(first[s * (DIM + 2) + DIM] - largest);
        out[(ulong(m) * ulong(heads) + ulong(head)) * DIM + ulong(i)] = sum / total;
    }
}
