/*
 * dense_matmul fused with sample: chooses the same token without reading the whole matrix.
 *
 * Every row is scored from the compact head (head_score.h); head_layout.h bounds each score's error. A
 * few likely rows are then scored from the full weights, and after them every row that could still win or that
 * sampling could reach, given those few scores. Only exact scores are compared in the end, so the token is the
 * one that the exact logits give. Top-p without top-k is a share of the whole distribution: the winner is drawn from all
 * tokens, and checked (head_check.h). Rows where that leaves a doubt, or where too many tokens stay in reach, have all
 * their logits computed.
 *
 * The rows of the logits then hold approximate scores. Where the step says that somebody reads them, native.c runs
 * dense_matmul and sample instead.
 *
 * Long, because the stages of one operation hand on the same rows, lists and thresholds, in one order.
 */
#include <stdlib.h>

#include "head_logprobs.h"

#define HEAD_SPAN 16 /* chunks an item of work, in which rows in doubt are looked for */
#define CHUNK_PANELS (HEAD_CHUNK / HEAD_PANEL_ROWS)
_Static_assert(HEAD_CHUNK % HEAD_PANEL_ROWS == 0, "a chunk is whole panels");
_Static_assert(HEAD_CHUNK % (4 * VL) == 0, "a chunk is whole calls of gumbel()");

/* Whether all of the row's logits must be computed. */
INLINE bool head_all(head_row_t *row) {
    if (row->mode != HEAD_WITHIN) return row->mode == HEAD_ALL;
    return row->listed > HEAD_LIST || row->listed == 0; /* no token: a logit is NaN */
}

static head_scratch_t head_parts(const run_t *run, const dense_matmul_op_t *o, int64_t rows, size_t *bytes) {
    const size_t x = aligned_bytes((size_t)(rows * head_groups(o->x.columns)), HEAD_COLUMNS);
    const size_t row = aligned_bytes((size_t)rows, sizeof(head_row_t));
    const size_t tops = aligned_bytes((size_t)(rows * chunks_of(o->out.columns)), sizeof(scored_t));
    const size_t best = aligned_bytes((size_t)(rows * run->threads), sizeof(scored_t));
    const size_t evidence = aligned_bytes((size_t)(rows * run->threads), sizeof(evidence_t));
    const uintptr_t base = (uintptr_t)run->shared; /* 0 where only the size is asked for */
    *bytes = x + row + tops + best + evidence + aligned_bytes((size_t)(rows * chunks_of(o->out.columns)), sizeof(rest_t));
    return (head_scratch_t){
        (int32_t *)base,
        (head_row_t *)(base + x),
        (scored_t *)(base + x + row),
        (scored_t *)(base + x + row + tops),
        (evidence_t *)(base + x + row + tops + best),
        (rest_t *)(base + x + row + tops + best + evidence),
        rows};
}

static need_t head_sample_need(const run_t *run, const op_t *op) {
    need_t need = sample_need(run, op->head_sample.sample);
    const int64_t rows = run->program.limits.max_rows, reported = rows < HEAD_CHECKED_ROWS ? rows : HEAD_CHECKED_ROWS;
    head_parts(run, &op->head_sample.dense->dense_matmul, rows + reported, &need.shared);
    return need;
}

static head_mode_t head_mode(const draw_t *d, int64_t n, int64_t rows) {
    if (d->temperature == 0) return HEAD_GREEDY;
    const bool top_k = d->top_k > 0 && d->top_k < n;
    if (top_k) return d->top_k <= HEAD_LIST / 8 && d->top_k <= chunks_of(n) ? HEAD_WITHIN : HEAD_ALL;
    if (d->top_p < 1) return d->min_p > 0 || rows > HEAD_CHECKED_ROWS ? HEAD_ALL : HEAD_CHECKED;
    return d->min_p > 0 ? HEAD_WITHIN : HEAD_NOISE;
}

/* The key by which a row's tokens compete: the adjusted logit, with or without noise. */
INLINE float head_key(const head_row_t *row, float logit, float noise) {
    return head_noisy(row) ? logit / row->draw.temperature + noise : logit;
}

/* Keys of the `count` approximate scores of a chunk that begins at `token`. */
static void head_keys(const head_row_t *row, const float *scores, int64_t begin, int64_t count, float *keys) {
    for (int64_t i = 0; i < count; i++) keys[i] = adjusted(&row->adjust, scores[i], begin + i);
    if (!head_noisy(row)) return;
    float noise[HEAD_CHUNK];
    for (int64_t i = 0; i < count; i += 4 * VL)
        gumbel(begin + i, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise + i);
    for (int64_t i = 0; i < count; i++) keys[i] = head_key(row, keys[i], noise[i]);
}

/* Approximate scores of a row, from a token on. */
INLINE const float *head_scores(const dense_matmul_op_t *dense, const head_row_t *row, int64_t begin) {
    return (const float *)dense->out.data + row->logits * dense->out.stride + begin;
}

/* The adjusted logit of a token, from the full weights. */
static float head_logit(run_t *run, const dense_matmul_op_t *dense, const head_row_t *row, int64_t token) {
    atomic_fetch_add_explicit(&run->scored, 1, memory_order_relaxed);
    return adjusted(&row->adjust, dense_score(dense, token, row->logits), token);
}

/* The key of a token with this logit. */
static float head_key_of(const head_row_t *row, int64_t token, float logit) {
    float noise[4 * VL];
    if (head_noisy(row)) gumbel(token / 4 * 4, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
    return head_key(row, logit, head_noisy(row) ? noise[token % 4] : 0);
}

/* Sizes of the tokens of a chunk, by which they are taken. */
static void head_sizes(
    const head_sample_op_t *o, const head_row_t *row, const float *scores, int64_t chunk, int64_t count, float *u) {
    if (row->mode == HEAD_REPORTED) tell_sizes(o, row, scores, chunk, count, u);
    else check_sizes(o, row, scores, chunk, count, u);
}

/* The greatest key of a chunk. Its token is looked up only if needed. */
static void head_top(
    const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t chunk, evidence_t *evidence) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t begin = chunk * HEAD_CHUNK, n = dense->out.columns;
    const int64_t count = n - begin < HEAD_CHUNK ? n - begin : HEAD_CHUNK;
    const float *scores = head_scores(dense, &s->row[r], begin);
    float keys[HEAD_CHUNK];
    if (head_samples(&s->row[r])) {
        head_sizes(o, &s->row[r], scores, chunk, count, keys);
        check_peak(keys, evidence);
    }
    head_keys(&s->row[r], scores, begin, count, keys);
    s->tops[r * chunks_of(n) + chunk] = (scored_t){greatest(keys, count), (int32_t)chunk};
}

/* Prefetch a row of the weights. */
static void head_fetch(const dense_matmul_op_t *dense, int64_t token) {
    const int64_t bytes = weight_bytes(dense->type, dense->x.columns);
    const char *row = (const char *)dense->weight + token * bytes;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

#define HEAD_LIKELIEST 4 /* tokens scored first, to find the greatest */

/* A key or a threshold, lowered by as much as rounding to f32 may have moved it. */
INLINE float head_below(float key) { return key - (1e-5f + 1e-6f * fabsf(key)); }

/*
 * Score the likeliest tokens of a row exactly: the winner reaches what the best of them reaches, and the last that may be drawn,
 * or the last candidate for a filter that is checked, what they all reach.
 */
static void head_threshold(run_t *run, const dense_matmul_op_t *dense, const head_scratch_t *s, int64_t r) {
    head_row_t *row = &s->row[r];
    const int64_t n = dense->out.columns, chunks = chunks_of(n);
    const float *scores = head_scores(dense, row, 0);
    const draw_t *d = &row->draw;
    scored_t *tops = s->tops + r * chunks;
    const bool top_k = (row->mode == HEAD_WITHIN || row->mode == HEAD_REPORTED) && d->top_k > 0 && d->top_k < n;
    const bool all = top_k || row->mode == HEAD_CHECKED;
    const int64_t count = top_k ? d->top_k : HEAD_LIKELIEST < chunks ? HEAD_LIKELIEST : chunks;
    const bool sorts = count > MAX_LOGPROBS;
    if (sorts) qsort(tops, (size_t)chunks, sizeof *tops, falling);
    for (int64_t i = 0; !sorts && i < count; i++)
        for (int64_t c = i + 1; c < chunks; c++)
            if (tops[c].value > tops[i].value) {
                const scored_t other = tops[i];
                tops[i] = tops[c];
                tops[c] = other;
            }
    row->threshold = all ? INFINITY : -INFINITY;
    int64_t likely[HEAD_LIST / 8];
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = tops[i].token * (int64_t)HEAD_CHUNK, left = n - begin < HEAD_CHUNK ? n - begin : HEAD_CHUNK;
        float keys[HEAD_CHUNK];
        head_keys(row, scores + begin, begin, left, keys);
        likely[i] = begin + lowest_index_of(keys, tops[i].value, left);
        head_fetch(dense, likely[i]);
    }
    for (int64_t i = 0; i < count; i++) {
        const float key = head_key_of(row, likely[i], head_logit(run, dense, row, likely[i]));
        if (all ? !(key >= row->threshold) : !(key <= row->threshold)) row->threshold = key;
    }
    if (row->mode == HEAD_WITHIN && !top_k) row->threshold += d->temperature * logf(d->min_p);
    row->check.peak = -INFINITY;
    for (int t = 0; head_samples(row) && t < pool_threads(run->pool); t++) {
        const float peak = s->evidence[t * s->rows + r].peak;
        if (!(peak <= row->check.peak)) row->check.peak = peak;
    }
    row->threshold = head_below(row->threshold);
}

/* Tokens whose weight rows have been prefetched and are still to be scored. With several in flight at a
 * time, no thread waits for each in turn. */
#define HEAD_DOUBTS 8
typedef struct {
    int64_t token, r;
    float chance; /* with which it was taken as evidence; 0: it is a candidate */
} doubt_t;
typedef struct {
    doubt_t of[HEAD_DOUBTS];
    int first, count;
    scored_t *best; /* this thread's best of every row */
    evidence_t *evidence; /* and its evidence */
} doubts_t;

/* Score the token that has waited longest. */
static void head_settle(run_t *run, const head_sample_op_t *o, const head_scratch_t *s, doubts_t *doubts) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const doubt_t own = doubts->of[doubts->first];
    doubts->first = (doubts->first + 1) % HEAD_DOUBTS;
    doubts->count--;
    head_row_t *row = &s->row[own.r];
    const float logit = head_logit(run, dense, row, own.token);
    if (own.chance > 0) {
        rest_t *rest = &s->rest[own.r * chunks_of(dense->out.columns) + own.token / HEAD_CHUNK];
        if (row->mode == HEAD_REPORTED) tell_add(o, row, own.token, logit, rest);
        else check_add(row, logit / row->draw.temperature, own.chance, &doubts->evidence[own.r]);
    } else if (head_lists(row)) {
        const bool drawn = row->mode == HEAD_CHECKED || row->mode == HEAD_AGAIN; /* of z */
        const int32_t at = row->listed++;
        if (at < HEAD_LIST) row->list[at] = (scored_t){drawn ? logit / row->draw.temperature : logit, (int32_t)own.token};
    } else {
        const scored_t exact = {head_key_of(row, own.token, logit), (int32_t)own.token};
        scored_t *best = &doubts->best[own.r];
        if (exact.value != exact.value) {
            *best = (scored_t){INFINITY, NO_TOKEN}; /* NaN wins over all */
        } else if (exact.value > best->value || (exact.value == best->value && exact.token < best->token)) {
            *best = exact;
        }
    }
}

/* Prefetch a token's row, and score it after those that wait already. */
static void head_doubt(
    run_t *run, const head_sample_op_t *o, const head_scratch_t *s, doubts_t *doubts, doubt_t doubt) {
    if (doubts->count == HEAD_DOUBTS) head_settle(run, o, s, doubts);
    head_fetch(&o->dense->dense_matmul, doubt.token);
    doubts->of[(doubts->first + doubts->count++) % HEAD_DOUBTS] = doubt;
}

/* Score exactly the tokens of one chunk (the c-th in the order of `tops`) that may reach the threshold. */
static void head_filter(
    run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t c, doubts_t *doubts) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const head_row_t *row = &s->row[r];
    const int64_t n = dense->out.columns;
    const scored_t top = s->tops[r * chunks_of(n) + c];
    const int64_t begin = top.token * (int64_t)HEAD_CHUNK, count = n - begin < HEAD_CHUNK ? n - begin : HEAD_CHUNK;
    const float *scores = head_scores(dense, row, begin);
    const float scale = head_slope(row), norm = o->chunk_norm[top.token];
    float keys[HEAD_CHUNK];
    if (head_samples(row)) {
        head_sizes(o, row, scores, top.token, count, keys);
        check_count(row, keys, count, &doubts->evidence[r]);
    }
    /* Where one token is wanted, this thread's best rules out more of them. */
    const float own = head_lists(row) ? -INFINITY : head_below(doubts->best[r].value);
    const float threshold = own > row->threshold ? own : row->threshold;
    /* Written so that a NaN stays in. */
    if (top.value + scale * head_bound(row, o->chunk_step[top.token], norm) < threshold) return;
    head_keys(row, scores, begin, count, keys);
    for (int64_t i = 0; i < count && row->listed <= HEAD_LIST; i++) {
        if (keys[i] + scale * head_bound(row, o->step[begin + i], norm) < threshold) continue;
        head_doubt(run, o, s, doubts, (doubt_t){begin + i, r, 0});
    }
}

/* Take tokens of a chunk as evidence, or, where no candidate passed, all that may be likelier. */
static void head_evidence(
    run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t chunk, doubts_t *doubts) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const head_row_t *row = &s->row[r];
    const int64_t begin = chunk * HEAD_CHUNK, n = dense->out.columns, count = n - begin < HEAD_CHUNK ? n - begin : HEAD_CHUNK;
    const float *scores = head_scores(dense, row, begin);
    float u[HEAD_CHUNK], chance[HEAD_CHUNK];
    int32_t taken[HEAD_CHUNK];
    if (row->mode == HEAD_AGAIN) {
        check_rough(row, scores, begin, count, u);
        for (int64_t i = 0; i < count && row->listed <= HEAD_LIST; i++)
            if (!(u[i] + check_reach(o, row, begin + i, 1)[0] < head_below(row->check.z)))
                head_doubt(run, o, s, doubts, (doubt_t){begin + i, r, 0});
        return;
    }
    head_sizes(o, row, scores, chunk, count, u);
    if (row->mode == HEAD_REPORTED) {
        tell_rest(o, row, u, chunk, count, taken, &s->rest[r * chunks_of(n) + chunk]);
        for (int64_t i = 0; i < count; i++)
            if (taken[i]) head_doubt(run, o, s, doubts, (doubt_t){begin + i, r, 1});
        return;
    }
    if (!check_take(row, u, begin, count, chance, taken)) return;
    for (int64_t i = 0; i < count; i++)
        if (taken[i]) head_doubt(run, o, s, doubts, (doubt_t){begin + i, r, chance[i]});
}

/* The best of all threads. */
static scored_t head_best(const run_t *run, const head_scratch_t *s, int64_t r) {
    scored_t best = s->best[r];
    for (int t = 1; t < pool_threads(run->pool); t++) {
        const scored_t other = s->best[t * s->rows + r];
        if (other.value > best.value || (other.value == best.value && other.token < best.token)) best = other;
    }
    return best;
}

/* Begin to take rows of the head: the list has all candidates. */
static void head_check_begin(run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r) {
    head_row_t *row = &s->row[r];
    const int64_t n = o->dense->dense_matmul.out.columns;
    const int threads = pool_threads(run->pool);
    bool numbers = row->listed <= HEAD_LIST;
    if (row->mode == HEAD_REPORTED) {
        numbers &= tell_plan(o, row, s->evidence + r, s->rows, threads, n);
    } else {
        check_rate(s->evidence + r, s->rows, threads, &row->check);
        numbers &= fabsf(row->check.log_rate) < INFINITY;
    }
    for (int32_t i = 0; numbers && i < row->listed; i++) numbers = row->list[i].value == row->list[i].value;
    if (!numbers || (row->mode == HEAD_CHECKED && !check_next(row, -INFINITY))) row->mode = HEAD_ALL;
}

/* Check the winners of the rows that top-p filters, and normalisers; every thread enters. */
static void head_check(run_t *run, const head_sample_op_t *o, const head_scratch_t *s, doubts_t *doubts, int thread) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t n = dense->out.columns, chunks = chunks_of(n), spans = (chunks + HEAD_SPAN - 1) / HEAD_SPAN;
    const int threads = pool_threads(run->pool);
    for (int64_t r; (r = pool_take(run->pool, thread, s->rows)) >= 0;)
        if (head_samples(&s->row[r])) head_check_begin(run, o, s, r);
    pool_barrier(run->pool, thread);

    for (;;) {
        int64_t open = 0, which[2 * HEAD_CHECKED_ROWS];
        for (int64_t r = 0; r < s->rows; r++)
            if (head_samples(&s->row[r]) || s->row[r].mode == HEAD_AGAIN) which[open++] = r;
        if (open == 0) return;
        for (int64_t i; (i = pool_take(run->pool, thread, open * spans)) >= 0;)
            for (int64_t c = i % spans * HEAD_SPAN; c < chunks && c < (i % spans + 1) * HEAD_SPAN; c++)
                head_evidence(run, o, s, which[i / spans], c, doubts);
        while (doubts->count) head_settle(run, o, s, doubts);
        pool_barrier(run->pool, thread);

        for (int64_t i; (i = pool_take(run->pool, thread, open)) >= 0;) {
            const int64_t r = which[i];
            head_row_t *row = &s->row[r];
            if (row->mode == HEAD_AGAIN) {
                row->check.winner = row->listed > HEAD_LIST ? NO_TOKEN : check_again(row);
                row->mode = row->check.winner == NO_TOKEN ? HEAD_ALL : HEAD_DRAWN;
            } else if (row->mode == HEAD_REPORTED) {
                tell_verdict(o, s, r, s->evidence + r, threads, n);
            } else check_verdict(row, s->evidence + r, s->rows, threads, n);
        }
        pool_barrier(run->pool, thread);
    }
}

/* Whether all logits of a row are computed, for its token or for its log-probabilities. */
INLINE bool head_exact(const head_scratch_t *s, int64_t r, int64_t rows) {
    return head_all(&s->row[r]) || (s->rows > rows && head_all(&s->row[rows + r]));
}

static int rising_token(const void *a, const void *b) {
    const int32_t x = ((const scored_t *)a)->token, y = ((const scored_t *)b)->token;
    return (x > y) - (x < y);
}

/* Draw from the list in the order of the tokens, so that sums do not depend on the order of listing. */
static int32_t head_draw(head_row_t *row, float *z, float *p) {
    const int64_t n = row->listed;
    qsort(row->list, (size_t)n, sizeof *row->list, rising_token);
    for (int64_t i = 0; i < n; i++) z[i] = row->list[i].value / row->draw.temperature;
    if (any_nan(z, n)) return NO_TOKEN;
    const threshold_t keep = draw_threshold(&row->draw, z, p, n);
    float best = -INFINITY, noise[4 * VL];
    int32_t token = row->list[0].token;
    for (int64_t i = 0; i < n; i++) {
        if (!passes(&keep, z[i])) continue;
        const int32_t id = row->list[i].token;
        gumbel(id / 4 * 4, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
        if (!(z[i] + noise[id % 4] > best)) continue;
        best = z[i] + noise[id % 4];
        token = id;
    }
    return token;
}

static int32_t head_choose(
    const run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, float *z, float *p) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    head_row_t *row = &s->row[r];
    if (head_all(row))
        return choose_adjusted(
            &row->draw, &row->adjust, (const float *)dense->out.data + r * dense->out.stride, dense->out.columns, z, p);
    if (row->mode == HEAD_WITHIN) return head_draw(row, z, p);
    if (row->mode == HEAD_DRAWN) return row->check.winner;
    const scored_t best = head_best(run, s, r);
    return best.token == INT32_MAX ? NO_TOKEN : best.token;
}

static stretch_t head_sample_begins(const run_t *run, const op_t *op, int thread) {
    const dense_matmul_op_t *dense = &op->head_sample.dense->dense_matmul;
    const int64_t chunks = chunks_of(dense->out.columns), bytes = CHUNK_PANELS * head_panel_bytes(dense->x.columns);
    const uint8_t *codes = op->head_sample.codes;
    const uint8_t *end = codes + head_bytes(dense->out.columns, dense->x.columns);
    return (stretch_t){codes + pool_share(run->pool, thread, chunks) * bytes, end};
}

/* Prepare a row of logits, and the row that finds its log-probabilities, if they are wanted. */
static void head_begin(run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r) {
    const int64_t rows = run->step.rows, n = o->dense->dense_matmul.out.columns;
    head_row_t *row = &s->row[r];
    row->draw = draw_of(&run->step, r);
    row->adjust = adjust_of(&run->step, &o->sample->sample, r);
    row->mode = head_quantise(o, s, r, rows) ? head_mode(&row->draw, n, rows) : HEAD_ALL;
    row->logits = (int32_t)r;
    row->listed = row->check.stage = 0;
    if (row->mode == HEAD_CHECKED) check_begin(row, n);
    if (s->rows == rows) return;
    head_row_t *reported = &s->row[rows + r];
    tell_begin(reported, row, run->step.logprobs / 2);
    reported->logits = (int32_t)r;
    reported->listed = reported->check.stage = 0;
}

/* Keep a row's token and its log-probabilities. `z` and `p` are scratch. */
static void head_keep(run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, float *z, float *p) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const sample_op_t *sample = &o->sample->sample;
    keep_token(sample, &s->row[r].adjust, r, head_choose(run, o, s, r, z, p));
    if (s->rows == run->step.rows) return;
    const int32_t words = run->step.logprobs, token = sample->out[r];
    const int64_t n = dense->out.columns, reported = run->step.rows + r;
    int32_t *to = run->logprobs + r * words;
    if (head_all(&s->row[reported])) {
        tell_logprobs(head_scores(dense, &s->row[r], 0), n, token, words / 2, to, p);
    } else {
        const float logit = token == NO_TOKEN ? NAN : head_logit(run, dense, &s->row[reported], token);
        tell_words(&s->row[reported], token, logit, words / 2, to);
    }
}

static void head_sample(run_t *run, const op_t *op, int thread) {
    const head_sample_op_t *o = &op->head_sample;
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t rows = run->step.rows, n = dense->out.columns, chunks = chunks_of(n);
    if (rows == 0) return;
    size_t bytes;
    const head_scratch_t s = head_parts(run, dense, run->step.logprobs ? 2 * rows : rows, &bytes);
    float *z = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    float *p = z + aligned_bytes((size_t)n + 4 * VL, sizeof(float)) / sizeof(float);
    for (int64_t r; (r = pool_take(run->pool, thread, rows)) >= 0;) head_begin(run, o, &s, r);
    doubts_t doubts = {.best = s.best + thread * s.rows, .evidence = s.evidence + thread * s.rows};
    for (int64_t r = 0; r < s.rows; r++) {
        doubts.best[r] = (scored_t){-INFINITY, INT32_MAX};
        doubts.evidence[r] = (evidence_t){.peak = -INFINITY};
    }
    pool_barrier(run->pool, thread);
    bool samples = false;
    for (int64_t r = 0; r < s.rows; r++) samples |= head_samples(&s.row[r]);

    for (int64_t c; (c = pool_take(run->pool, thread, chunks)) >= 0;) {
        const int64_t first = c * CHUNK_PANELS, panels = head_panels(n);
        for (int64_t i = first; i < first + CHUNK_PANELS && i < panels; i++) head_panel(run, o, &s, i);
        for (int64_t r = 0; r < s.rows; r++) head_top(o, &s, r, c, &doubts.evidence[r]);
    }
    pool_barrier(run->pool, thread);

    for (int64_t r; (r = pool_take(run->pool, thread, s.rows)) >= 0;)
        if (s.row[r].mode != HEAD_ALL) head_threshold(run, dense, &s, r);
    pool_barrier(run->pool, thread);

    const int64_t spans = (chunks + HEAD_SPAN - 1) / HEAD_SPAN;
    for (int64_t i; (i = pool_take(run->pool, thread, s.rows * spans)) >= 0;)
        for (int64_t c = i % spans * HEAD_SPAN; c < chunks && c < (i % spans + 1) * HEAD_SPAN; c++)
            if (s.row[i / spans].mode != HEAD_ALL) head_filter(run, o, &s, i / spans, c, &doubts);
    while (doubts.count) head_settle(run, o, &s, &doubts);
    pool_barrier(run->pool, thread);

    if (samples) head_check(run, o, &s, &doubts, thread);
    bool any = false;
    for (int64_t r = 0; r < s.rows; r++) any |= head_all(&s.row[r]);
    if (any) {
        if (thread == 0) run->scored += n; /* all rows of logits share the reads */
        for (int64_t c; (c = pool_take(run->pool, thread, chunks)) >= 0;) {
            const int64_t first = c * HEAD_CHUNK, end = first + HEAD_CHUNK < n ? first + HEAD_CHUNK : n;
            for (int64_t r = 0, stop; r < rows; r = stop + 1) {
                for (stop = r; stop < rows && head_exact(&s, stop, rows);) stop++;
                dense_chunk(dense, first, end, r, stop);
            }
        }
        pool_barrier(run->pool, thread);
    }
    for (int64_t r; (r = pool_take(run->pool, thread, rows)) >= 0;) head_keep(run, o, &s, r, z, p);
}
