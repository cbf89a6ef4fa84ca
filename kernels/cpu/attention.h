/*
 * attention: causal, grouped-query, over the paged cache.
 *
 * An item of work is up to QUERIES query rows (token and head) of one sequence that share a key/value head, so that
 * keys and values are read once for all of them. The softmax runs online over CHUNK positions at a time (Milakov and
 * Gimelshein 2018). A decoding sequence is split along its positions, depending only on its length, and the parts are
 * merged. So the result's bits do not depend on the number of threads.
 */

#include "attention_runs.h"

#define SPLIT 512 /* minimum positions a part */
#define MAX_SPLITS 16
#define FAR 8192 /* positions per sum; longer sums would lose digits */

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

/* The first position of the chunk in which a token's window begins: chunks begin at the same positions for every token, so
 * that sums have the same order. */
INLINE int32_t window_begin(const attention_op_t *o, int32_t position) {
    return o->window && position >= o->window ? (position + 1 - o->window) / CHUNK * CHUNK : 0;
}

/* Scores to probabilities against the running maximum, for one query that sees the positions first … n - 1 of the chunk; n
 * is above first. */
static void soften(const queries_t *s, const attention_scratch_t *t, int q, int first, int n) {
    float *scores = t->scores + q * (CHUNK + VL);
    for (int i = 0; i < first; i++) scores[i] = scores[first]; /* whatever is behind the window */
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
        for (int j = i; j < first && j < i + VL; j++) scores[j] = 0.0f;
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
        /* The positions that a query sees, and those that all see, relative to the chunk. */
        int32_t from[QUERIES], seen[QUERIES], least = stop - chunk, behind = 0;
        for (int q = 0; q < s->count; q++) {
            from[q] = o->window && s->last[q] - o->window >= chunk ? s->last[q] + 1 - o->window - chunk : 0;
            seen[q] = s->last[q] + 1 < stop ? s->last[q] + 1 - chunk : stop - chunk;
            if (seen[q] < least) least = seen[q];
            if (from[q] > behind) behind = from[q];
            if (seen[q] > from[q]) soften(s, t, q, from[q], seen[q]);
        }
        if (least < behind) least = behind;
        /* Positions that some queries do not see, whatever they hold, reach only the queries that do. */
        for (int32_t p = chunk, n; p < stop; p += n) {
            const int64_t head = s->table[p / size] * kv->block + s->group * kv->v_head;
            const bool shared = p >= chunk + behind && p < chunk + least;
            const int32_t limit = shared ? chunk + least : p < chunk + behind && behind < stop - chunk ? chunk + behind : stop;
            n = size - p % size < limit - p ? size - p % size : limit - p;
            if (shared) {
                add_values(s, t, head, p % size, p - chunk, n, 0, s->count);
                continue;
            }
            for (int q = 0; q < s->count; q++) {
                const int32_t at = p - chunk, skip = from[q] > at ? from[q] - at : 0;
                const int32_t own = (seen[q] - at < n ? seen[q] - at : n) - skip;
                if (own > 0) add_values(s, t, head, p % size + skip, at + skip, own, q, 1);
            }
        }
        /* With a window, positions of a sum are the same for every token. */
        if (t->far && (o->window ? stop : stop - begin) % FAR == 0) {
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

/* Positions from where the window of a sequence's last token begins. */
INLINE int32_t seen_length(const attention_op_t *o, const step_t *step, int32_t s) {
    return step->seq_len[s] - window_begin(o, step->seq_len[s] - 1);
}

static int64_t items_of(const run_t *run, const attention_op_t *o, int32_t s) {
    const step_t *step = &run->step;
    const int32_t tokens = tokens_of(step, s);
    return (int64_t)tiles_of_queries(o, tokens) * splits_of(run, tokens, seen_length(o, step, s)) * o->kv_heads;
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
        const int32_t splits = splits_of(run, tokens, seen_length(o, step, s)), tiles = tiles_of_queries(o, tokens);
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
        .table = step->block_table + o->table + (int64_t)item->s * run->program.limits.max_blocks,
        .group = item->group,
        .count = queries_in(o, item),
        .decodes = item->tokens == 1,
    };
    for (int q = 0; q < s.count; q++) {
        const int32_t row = item->tile * QUERIES + q, m = first + row / ratio;
        s.last[q] = token_position(step, m);
        s.q[q] = (const float *)o->qkv.data + (int64_t)m * o->qkv.stride + (item->group * ratio + row % ratio) * o->head_dim;
    }
    int32_t begin = window_begin(o, s.last[0]), end = s.last[s.count - 1] + 1;
    if (item->splits > 1) {
        const int32_t part = split_length(seen_length(o, step, item->s));
        begin += item->split * part;
        end = begin + part < end ? begin + part : end;
        t.partial = partial_at(run, o, item);
    }
    if ((o->window ? o->window : end - begin) <= FAR) t.far = NULL;
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
        split |= splits_of(run, tokens_of(step, s), seen_length(o, step, s)) > 1;
    if (!split) return;
    pool_barrier(run->pool, thread);
    while (next_item(run, o, thread, &item))
        if (item.splits > 1 && item.split == 0) merge(run, o, &item);
}
