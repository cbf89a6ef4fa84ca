/*
 * Attention over runs of neighbouring positions that are in one block of the cache: scores of their keys, and sums of
 * their values. attention.h divides the work into such runs.
 *
 * Keys are stored transposed: a vector holds one element of neighbouring positions, so scores need no sums across lanes.
 * Values are summed along the head.
 */

#if defined(__AVX512F__) && !defined(__AMX_INT8__)
#define QUERIES 16 /* a key or a value is converted once for all of them; Intel's processors gain nothing by it */
#else
#define QUERIES 8
#endif
#define CHUNK 128

/* Sums over one item; before a merge, out = acc / sum. */
typedef struct {
    float top[QUERIES], sum[QUERIES];
    float acc[]; /* [QUERIES][v_stride] */
} partial_t;

typedef struct {
    const attention_op_t *op;
    const kv_t *kv;
    const int32_t *table; /* the sequence's blocks */
    int64_t group; /* key/value head */
    int32_t count; /* query rows of this item, at most QUERIES */
    bool decodes; /* one token */
    int32_t last[QUERIES]; /* position of each */
    const float *q[QUERIES];
} queries_t;

typedef struct {
    float *q; /* [d][QUERIES], divided by sqrt(d) */
    float *scores; /* [QUERIES][CHUNK + VL] */
    partial_t *partial;
    float *far; /* [QUERIES][v_stride]: sums of the FAR-position runs completed so far; NULL if there are at most FAR positions */
} attention_scratch_t;

INLINE vf cache_load(const void *cache, int64_t at, const int type) {
    if (type == KV_I8) return v_load_codes((const int8_t *)cache + at);
    return type == KV_F16 ? v_load_half((const half_t *)cache + at) : v_load((const float *)cache + at);
}

/* Scales of an i8 cache, from a position on: they stand behind the `codes` elements of the head that is at `head`. */
INLINE const float *scales_of(const void *cache, int64_t head, int64_t codes, int32_t place) {
    return (const float *)((const int8_t *)cache + head + codes) + place;
}

#define PART 4 /* elements of the keys that are scored between two prefetches; it divides every head */

/* Keys and values needed next: a part of them is prefetched with each part of the keys that are scored, since no
 * processor guesses where the next block is. */
typedef struct {
    const char *keys, *values;
    int64_t keys_step, values_step; /* bytes a part */
} wanted_t;

INLINE void ask_for(const wanted_t *wanted, int part) {
    const char *keys = wanted->keys + part * wanted->keys_step, *values = wanted->values + part * wanted->values_step;
    for (int64_t i = 0; i < wanted->keys_step; i += 64) __builtin_prefetch(keys + i, 0, 2);
    for (int64_t i = 0; i < wanted->values_step; i += 64) __builtin_prefetch(values + i, 0, 2);
}

/* scores[q][0 … n) of adjacent positions from `at` on; lanes behind n are overwritten later. Codes are multiplied with q
 * as they are, and their sums with the positions' scales. */
INLINE void score_run(
    const queries_t *s, const attention_scratch_t *t, int64_t at, int64_t offset, int n, const wanted_t *wanted,
    const float *scales, const int type, const int nq) {
    const int64_t stride = s->kv->k_stride;
    const int d = s->op->head_dim;
    const int wide = nq <= 8; /* two vectors at a time: with more queries, sums of one fill the registers */
    for (int i = 0; i < n; i += VL << wide) {
        const int two = wide && n - i > VL; /* where it is one, the other is read and not stored */
        vf sum[QUERIES][2];
#pragma clang loop unroll(full)
        for (int q = 0; q < nq; q++) sum[q][0] = sum[q][1] = v_set(0.0f);
        int64_t from = at + i;
        for (int part = 0; part < d; part += PART) {
            if (i == 0) ask_for(wanted, part / PART);
            for (int e = part; e < part + PART; e++, from += stride) {
                const vf k0 = cache_load(s->op->layer.k, from, type);
                const vf k1 = wide ? cache_load(s->op->layer.k, from + VL, type) : k0;
#pragma clang loop unroll(full)
                for (int q = 0; q < nq; q++) {
                    const vf y = v_set(t->q[e * QUERIES + q]);
                    sum[q][0] = v_fma(y, k0, sum[q][0]);
                    if (wide) sum[q][1] = v_fma(y, k1, sum[q][1]);
                }
            }
        }
#pragma clang loop unroll(full)
        for (int q = 0; q < nq; q++) {
            float *scores = t->scores + q * (CHUNK + VL) + offset + i;
            if (type == KV_I8) {
                sum[q][0] *= v_load(scales + i);
                if (two) sum[q][1] *= v_load(scales + i + VL);
            }
            v_store(scores, sum[q][0]);
            if (two) v_store(scores + VL, sum[q][1]);
        }
    }
}

/* acc[q] += p[q][i] · v[i] for n positions from `at` on and the queries first … first + nq - 1. */
INLINE void value_run(
    const queries_t *s, const attention_scratch_t *t, int64_t at, int64_t offset, int n, const int type, int first,
    const int nq) {
    const int64_t stride = s->kv->v_stride;
    const int wide = nq <= 8;
    for (int64_t e = 0; e < stride; e += VL << wide) {
        const int two = wide && stride - e > VL;
        vf sum[QUERIES][2];
#pragma clang loop unroll(full)
        for (int q = 0; q < nq; q++) {
            const float *acc = t->partial->acc + (first + q) * stride + e;
            sum[q][0] = v_load(acc);
            sum[q][1] = two ? v_load(acc + VL) : v_set(0.0f);
        }
        for (int i = 0; i < n; i++) {
            const int64_t from = at + i * stride + e;
            const vf v0 = cache_load(s->op->layer.v, from, type);
            const vf v1 = wide ? cache_load(s->op->layer.v, from + VL, type) : v0;
#pragma clang loop unroll(full)
            for (int q = 0; q < nq; q++) {
                const vf p = v_set(t->scores[(first + q) * (CHUNK + VL) + offset + i]);
                sum[q][0] = v_fma(p, v0, sum[q][0]);
                if (wide) sum[q][1] = v_fma(p, v1, sum[q][1]);
            }
        }
#pragma clang loop unroll(full)
        for (int q = 0; q < nq; q++) {
            float *acc = t->partial->acc + (first + q) * stride + e;
            v_store(acc, sum[q][0]);
            if (two) v_store(acc + VL, sum[q][1]);
        }
    }
}

/* Number of queries that the code for `count` is compiled for; the surplus ones are 0 and are not stored. */
INLINE int rounded_up(int count) {
    return count <= 3 ? count : count <= 4 ? 4 : count <= 6 ? 6 : count <= 8 ? 8 : count <= 12 && QUERIES > 8 ? 12 : QUERIES;
}

#define BY_COUNT(count, call) \
    do { \
        const int made = rounded_up(count); \
        if (made == 1) call(1); \
        else if (made == 2) call(2); \
        else if (made == 3) call(3); \
        else if (made == 4) call(4); \
        else if (made == 6) call(6); \
        else if (made == 8) call(8); \
        else if (made == 12 && QUERIES > 12) call(QUERIES * 3 / 4); \
        else call(QUERIES); \
    } while (0)

static void score_positions(
    const queries_t *s, const attention_scratch_t *t, int64_t head, int32_t place, int64_t offset, int n,
    const wanted_t *wanted) {
    const int64_t at = head + place;
    const float *scales = scales_of(s->op->layer.k, head, (int64_t)s->op->head_dim * s->kv->k_stride, place);
#define CALL(nq) \
    do { \
        if (s->kv->type == KV_I8) score_run(s, t, at, offset, n, wanted, scales, KV_I8, nq); \
        else if (s->kv->type == KV_F16) score_run(s, t, at, offset, n, wanted, NULL, KV_F16, nq); \
        else score_run(s, t, at, offset, n, wanted, NULL, KV_F32, nq); \
    } while (0)
    BY_COUNT(s->count, CALL);
#undef CALL
}

static void add_values(
    const queries_t *s, const attention_scratch_t *t, int64_t head, int32_t place, int64_t offset, int n, int first,
    int count) {
    const kv_t *kv = s->kv;
    const int64_t at = head + place * kv->v_stride;
    if (kv->type == KV_I8) { /* probabilities take the scales, so that codes can be added as they are */
        const float *scales = scales_of(s->op->layer.v, head, (int64_t)kv->block_size * kv->v_stride, place);
        for (int q = first; q < first + count; q++) {
            float *p = t->scores + q * (CHUNK + VL) + offset;
            for (int i = 0; i < n; i += VL) v_store_part(p + i, v_load(p + i) * v_load(scales + i), n - i < VL ? n - i : VL);
        }
    }
#define CALL(nq) \
    do { \
        if (kv->type == KV_I8) value_run(s, t, at, offset, n, KV_I8, first, nq); \
        else if (kv->type == KV_F16) value_run(s, t, at, offset, n, KV_F16, first, nq); \
        else value_run(s, t, at, offset, n, KV_F32, first, nq); \
    } while (0)
    BY_COUNT(count, CALL);
#undef CALL
}
