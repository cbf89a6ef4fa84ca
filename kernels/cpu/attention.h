/*
 * attention: causal, grouped-query, over the paged cache.
 *
 * An item of work is up to QUERIES query rows (token and head) of one sequence that share a key/value head, so that
 * keys and values are read once for all of them. Keys are stored transposed: a vector holds one element of neighbouring
 * positions, so scores need no sums across lanes. Values are summed along the head. The softmax runs online over CHUNK
 * positions at a time (Milakov and Gimelshein 2018). A decoding sequence is split along its positions, depending only
 * on its length, and the parts are merged. So the result's bits do not depend on the number of threads.
 */

#if defined(__AVX512F__) && !defined(__AMX_INT8__)
#define QUERIES 16 /* a key or a value is converted once for all of them; Intel's processors gain nothing by it */
#else
#define QUERIES 8
#endif
#define CHUNK 128
#define SPLIT 512 /* minimum positions a part */
#define MAX_SPLITS 16
#define FAR 8192 /* positions whose sum is set aside: one added to the sum of many more would lose digits */

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
    float *far; /* [QUERIES][v_stride]: what `partial` has of every FAR positions before; NULL where there are no more than that */
} attention_scratch_t;

INLINE size_t partial_bytes(const kv_t *kv) {
    return aligned_bytes(sizeof(partial_t) + QUERIES * (size_t)kv->v_stride * sizeof(float), 1);
}

INLINE size_t far_bytes(const kv_t *kv) { return aligned_bytes(QUERIES * (size_t)kv->v_stride, sizeof(float)); }

INLINE int32_t split_length(int32_t length) {
    int32_t even = (length + MAX_SPLITS - 1) / MAX_SPLITS;
    return even <= SPLIT ? SPLIT : (even + CHUNK - 1) / CHUNK * CHUNK;
}

/* A deterministic program has no parts: a position is summed in the same order whether it is decoded or in a prompt. */
INLINE int32_t splits_of(const run_t *run, int32_t tokens, int32_t length) {
    if (tokens > 1 || run->program.deterministic) return 1;
    int32_t part = split_length(length);
    return (length + part - 1) / part;
}

INLINE int32_t tiles_of_queries(const attention_op_t *o, int32_t tokens) {
    return (tokens * (o->heads / o->kv_heads) + QUERIES - 1) / QUERIES;
}

static need_t attention_need(const run_t *run, const op_t *op) {
    const attention_op_t *o = &op->attention;
    const kv_t *kv = &run->program.kv;
    const limits_t *limits = &run->program.limits;
    const size_t partials = (size_t)limits->max_seqs * (size_t)o->kv_heads * (size_t)tiles_of_queries(o, 1) * MAX_SPLITS;
    const size_t q = aligned_bytes((size_t)o->head_dim * QUERIES, sizeof(float));
    const size_t scores = aligned_bytes(QUERIES * (CHUNK + VL), sizeof(float));
    const bool split = limits->max_blocks * (int64_t)kv->block_size > SPLIT;
    return (need_t){
        .shared = split ? partials * partial_bytes(kv) : 0,
        .scratch = q + scores + partial_bytes(kv) + far_bytes(kv),
    };
}

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
        for (int q = 0; q < nq; q++) sum[q][0] = sum[q][1] = v_set(0.0f);
        int64_t from = at + i;
        for (int part = 0; part < d; part += PART) {
            if (i == 0) ask_for(wanted, part / PART);
            for (int e = part; e < part + PART; e++, from += stride) {
                const vf k0 = cache_load(s->op->layer.k, from, type);
                const vf k1 = wide ? cache_load(s->op->layer.k, from + VL, type) : k0;
                for (int q = 0; q < nq; q++) {
                    const vf y = v_set(t->q[e * QUERIES + q]);
                    sum[q][0] = v_fma(y, k0, sum[q][0]);
                    if (wide) sum[q][1] = v_fma(y, k1, sum[q][1]);
                }
            }
        }
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
        for (int q = 0; q < nq; q++) {
            const float *acc = t->partial->acc + (first + q) * stride + e;
            sum[q][0] = v_load(acc);
            sum[q][1] = two ? v_load(acc + VL) : v_set(0.0f);
        }
        for (int i = 0; i < n; i++) {
            const int64_t from = at + i * stride + e;
            const vf v0 = cache_load(s->op->layer.v, from, type);
            const vf v1 = wide ? cache_load(s->op->layer.v, from + VL, type) : v0;
            for (int q = 0; q < nq; q++) {
                const vf p = v_set(t->scores[(first + q) * (CHUNK + VL) + offset + i]);
                sum[q][0] = v_fma(p, v0, sum[q][0]);
                if (wide) sum[q][1] = v_fma(p, v1, sum[q][1]);
            }
        }
        for (int q = 0; q < nq; q++) {
            float *acc = t->partial->acc + (first + q) * stride + e;
            v_store(acc, sum[q][0]);
            if (two) v_store(acc + VL, sum[q][1]);
        }
    }
}

/* Number of queries that the code for `count` is compiled for; the surplus ones are 0 and are not stored. */
INLINE int rounded_up(int count) {
    return count <= 2 ? count : count <= 4 ? 4 : count <= QUERIES / 2 ? QUERIES / 2 : QUERIES;
}

#define BY_COUNT(count, call) \
    do { \
        const int made = rounded_up(count); \
        if (made == 1) call(1); \
        else if (made == 2) call(2); \
        else if (made == 4) call(4); \
        else if (made == QUERIES / 2) call(QUERIES / 2); \
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

/* Scores to probabilities against the running maximum, for one query that sees n > 0 positions of the chunk. */
static void soften(const queries_t *s, const attention_scratch_t *t, int q, int n) {
    float *scores = t->scores + q * (CHUNK + VL);
    partial_t *partial = t->partial;
    vf tops = v_set(partial->top[q]);
    for (int i = 0; i + VL <= n; i += VL) tops = v_max(v_load(scores + i), tops);
    float top = v_top(tops);
    for (int i = n / VL * VL; i < n; i++) top = scores[i] > top ? scores[i] : top;
    vf sum = v_set(0.0f);
    for (int i = 0; i < n; i += VL) {
        const int rest = n - i < VL ? n - i : VL;
        sum = v_fma(v_load_part(scores + i, rest), v_set(0.0f), sum); /* a NaN, which v_exp and v_max would hide */
        vf p = v_exp(v_load(scores + i) - top);
        v_store(scores + i, p);
        sum += v_load_part(scores + i, rest);
    }
    if (top > partial->top[q]) {
        const vf shrink = v_exp(v_set(partial->top[q] - top));
        float *acc = partial->acc + (int64_t)q * s->kv->v_stride;
        for (int e = 0; e < s->kv->v_stride; e += VL) v_store(acc + e, v_load(acc + e) * shrink);
        float *far = t->far ? t->far + (int64_t)q * s->kv->v_stride : NULL;
        for (int e = 0; far && e < s->kv->v_stride; e += VL) v_store(far + e, v_load(far + e) * shrink);
        partial->sum[q] *= shrink[0];
        partial->top[q] = top;
    }
    partial->sum[q] += v_sum(sum);
}

/* The values of n positions from p on, which are in one block, and the keys of the block after it: where one token is
 * computed, everything is read once. */
INLINE wanted_t wanted_after(const queries_t *s, int32_t p, int n, int32_t end) {
    if (!s->decodes) return (wanted_t){0};
    const attention_op_t *o = s->op;
    const kv_t *kv = s->kv;
    const int d = o->head_dim, size = kv->block_size;
    const int64_t item = kv->type == KV_I8 ? 1 : kv->type == KV_F16 ? sizeof(half_t) : sizeof(float);
    const int64_t values = s->table[p / size] * kv->block + s->group * kv->v_head + p % size * kv->v_stride;
    const bool more = p + n < end;
    const int64_t keys = s->table[(more ? p + n : p) / size] * kv->block + s->group * kv->k_head;
    return (wanted_t){
        .keys = (const char *)o->layer.k + keys * item,
        .values = (const char *)o->layer.v + values * item,
        .keys_step = more ? kv->k_head * item / (d / PART) : 0,
        .values_step = n * kv->v_stride * item / (d / PART),
    };
}

/* to[0 … n) += from[0 … n), whole vectors. */
INLINE void add_floats(float *to, const float *from, size_t n) {
    for (size_t i = 0; i < n; i += VL) v_store(to + i, v_load(to + i) + v_load(from + i));
}

/* The positions begin … end - 1 of one item, `end` not beyond its last query. */
static void attend(const queries_t *s, const attention_scratch_t *t, int32_t begin, int32_t end) {
    const attention_op_t *o = s->op;
    const kv_t *kv = s->kv;
    const int d = o->head_dim, size = kv->block_size;
    const float scale = 1.0f / sqrtf((float)d);
    const int computed = rounded_up(s->count);
    for (int q = 0; q < computed; q++) {
        for (int e = 0; e < d; e++) t->q[e * QUERIES + q] = q < s->count ? s->q[q][e] * scale : 0.0f;
        t->partial->top[q] = -INFINITY;
        t->partial->sum[q] = 0;
    }
    float *acc = t->partial->acc;
    const size_t sums = (size_t)computed * (size_t)kv->v_stride;
    memset(acc, 0, sums * sizeof *acc);
    if (t->far) memset(t->far, 0, sums * sizeof *acc);
    for (int32_t chunk = begin; chunk < end; chunk += CHUNK) {
        const int32_t stop = chunk + CHUNK < end ? chunk + CHUNK : end;
        for (int32_t p = chunk, n; p < stop; p += n) {
            n = size - p % size < stop - p ? size - p % size : stop - p;
            const wanted_t wanted = wanted_after(s, p, n, end);
            const int64_t head = s->table[p / size] * kv->block + s->group * kv->k_head;
            score_positions(s, t, head, p % size, p - chunk, n, &wanted);
        }
        int32_t seen[QUERIES], least = stop - chunk;
        for (int q = 0; q < s->count; q++) {
            seen[q] = s->last[q] + 1 < stop ? s->last[q] + 1 - chunk : stop - chunk;
            if (seen[q] < least) least = seen[q];
            if (seen[q] > 0) soften(s, t, q, seen[q]);
        }
        if (least < 0) least = 0;
        /* Positions that some queries do not see, whatever they hold, reach only the queries that do. */
        for (int32_t p = chunk, n; p < stop; p += n) {
            const int64_t head = s->table[p / size] * kv->block + s->group * kv->v_head;
            const bool shared = p < chunk + least;
            const int32_t limit = shared ? chunk + least : stop;
            n = size - p % size < limit - p ? size - p % size : limit - p;
            if (shared) {
                add_values(s, t, head, p % size, p - chunk, n, 0, s->count);
                continue;
            }
            for (int q = 0; q < s->count; q++) {
                const int32_t own = seen[q] - (p - chunk);
                if (own > 0) add_values(s, t, head, p % size, p - chunk, own < n ? own : n, q, 1);
            }
        }
        if (t->far && (stop - begin) % FAR == 0) {
            add_floats(t->far, acc, sums);
            memset(acc, 0, sums * sizeof *acc);
        }
    }
    if (t->far) add_floats(acc, t->far, sums);
}

typedef struct {
    int32_t s, tokens, splits, tiles, tile, split;
    int64_t group;
} attention_item_t;

INLINE int32_t tokens_of(const step_t *step, int32_t s) { return step->seq_begin[s + 1] - step->seq_begin[s]; }

static int64_t items_of(const run_t *run, const attention_op_t *o, int32_t s) {
    const step_t *step = &run->step;
    const int32_t tokens = tokens_of(step, s);
    return (int64_t)tiles_of_queries(o, tokens) * splits_of(run, tokens, step->seq_len[s]) * o->kv_heads;
}

/* This thread's next item; false when none is left. */
static bool next_item(const run_t *run, const attention_op_t *o, int thread, attention_item_t *item) {
    const step_t *step = &run->step;
    int64_t total = 0;
    for (int32_t s = 0; s < step->seqs; s++) total += items_of(run, o, s);
    int64_t number = pool_take(run->pool, thread, total);
    for (int32_t s = 0; number >= 0 && s < step->seqs; s++) {
        const int64_t items = items_of(run, o, s);
        if (number >= items) {
            number -= items;
            continue;
        }
        const int32_t tokens = tokens_of(step, s);
        const int32_t splits = splits_of(run, tokens, step->seq_len[s]), tiles = tiles_of_queries(o, tokens);
        *item = (attention_item_t){
            .s = s,
            .tokens = tokens,
            .splits = splits,
            .tiles = tiles,
            .group = number % o->kv_heads,
            .split = (int32_t)(number / o->kv_heads % splits),
            /* The last queries see most positions: their tiles are taken first. */
            .tile = tiles - 1 - (int32_t)(number / o->kv_heads / splits),
        };
        return true;
    }
    return false;
}

INLINE partial_t *partial_at(const run_t *run, const attention_op_t *o, const attention_item_t *item) {
    const int64_t tile = (item->s * (int64_t)o->kv_heads + item->group) * tiles_of_queries(o, 1) + item->tile;
    return (partial_t *)(run->shared + (size_t)(tile * MAX_SPLITS + item->split) * partial_bytes(&run->program.kv));
}

static float *out_row(const run_t *run, const attention_op_t *o, const attention_item_t *item, int q) {
    const int32_t ratio = o->heads / o->kv_heads, row = item->tile * QUERIES + q;
    const int64_t m = run->step.seq_begin[item->s] + row / ratio;
    return (float *)o->out.data + m * o->out.stride + (item->group * ratio + row % ratio) * o->head_dim;
}

static void divide(const partial_t *from, int q, int64_t stride, float *out, int d) {
    const float inverse = 1.0f / from->sum[q];
    for (int e = 0; e < d; e += VL) {
        const int n = d - e < VL ? d - e : VL;
        v_store_part(out + e, v_load(from->acc + q * stride + e) * inverse, n);
    }
}

static int32_t queries_in(const attention_op_t *o, const attention_item_t *item) {
    const int32_t rows = item->tokens * (o->heads / o->kv_heads) - item->tile * QUERIES;
    return rows < QUERIES ? rows : QUERIES;
}

static void attention_item(run_t *run, const attention_op_t *o, const attention_item_t *item, attention_scratch_t t) {
    const step_t *step = &run->step;
    const int32_t ratio = o->heads / o->kv_heads, first = step->seq_begin[item->s];
    queries_t s = {
        .op = o,
        .kv = &run->program.kv,
        .table = step->block_table + (int64_t)item->s * run->program.limits.max_blocks,
        .group = item->group,
        .count = queries_in(o, item),
        .decodes = item->tokens == 1,
    };
    for (int q = 0; q < s.count; q++) {
        const int32_t row = item->tile * QUERIES + q, m = first + row / ratio;
        s.last[q] = token_position(step, m);
        s.q[q] = (const float *)o->qkv.data + (int64_t)m * o->qkv.stride + (item->group * ratio + row % ratio) * o->head_dim;
    }
    int32_t begin = 0, end = s.last[s.count - 1] + 1;
    if (item->splits > 1) {
        const int32_t part = split_length(step->seq_len[item->s]);
        begin = item->split * part;
        end = begin + part < end ? begin + part : end;
        t.partial = partial_at(run, o, item);
    }
    if (end - begin <= FAR) t.far = NULL;
    attend(&s, &t, begin, end);
    if (item->splits > 1) return;
    for (int q = 0; q < s.count; q++) divide(t.partial, q, s.kv->v_stride, out_row(run, o, item, q), o->head_dim);
}

/* Merge the parts of one tile into its first. */
static void merge(run_t *run, const attention_op_t *o, attention_item_t *item) {
    const int64_t stride = run->program.kv.v_stride;
    item->split = 0;
    partial_t *all = partial_at(run, o, item);
    for (int q = 0; q < queries_in(o, item); q++) {
        for (item->split = 1; item->split < item->splits; item->split++) {
            const partial_t *part = partial_at(run, o, item);
            const float top = part->top[q] > all->top[q] ? part->top[q] : all->top[q];
            const vf mine = v_exp(v_set(all->top[q] - top)), other = v_exp(v_set(part->top[q] - top));
            for (int64_t e = q * stride; e < (q + 1) * stride; e += VL)
                v_store(all->acc + e, v_load(all->acc + e) * mine + v_load(part->acc + e) * other);
            all->sum[q] = all->sum[q] * mine[0] + part->sum[q] * other[0];
            all->top[q] = top;
        }
        divide(all, q, stride, out_row(run, o, item, q), o->head_dim);
    }
}

static void attention(run_t *run, const op_t *op, int thread) {
    const attention_op_t *o = &op->attention;
    const step_t *step = &run->step;
    uint8_t *own = run->scratch + (size_t)thread * run->scratch_bytes;
    attention_scratch_t t = {.q = (float *)own};
    own += aligned_bytes((size_t)o->head_dim * QUERIES, sizeof(float));
    t.scores = (float *)own;
    own += aligned_bytes(QUERIES * (CHUNK + VL), sizeof(float));
    t.partial = (partial_t *)own;
    t.far = (float *)(own + partial_bytes(&run->program.kv));
    attention_item_t item;
    while (next_item(run, o, thread, &item)) attention_item(run, o, &item, t);

    bool split = false;
    for (int32_t s = 0; s < step->seqs; s++)
        split |= splits_of(run, tokens_of(step, s), step->seq_len[s]) > 1;
    if (!split) return;
    pool_barrier(run->pool, thread);
    while (next_item(run, o, thread, &item))
        if (item.splits > 1 && item.split == 0) merge(run, o, &item);
}
