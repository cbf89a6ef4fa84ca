/*
 * dense_matmul and sample in one: the token that they would choose, without reading the whole matrix.
 *
 * Every row is scored from the compact head, in 16-bit activations; head_layout.h bounds what each score may be off by. A
 * few likely rows are then scored from the weights themselves, and after them every row that could still win or that
 * sampling could reach, given what those few have shown. What is compared in the end are exact scores, so the token is the
 * one that the exact logits give. Rows whose parameters ask for the whole distribution (top-p without top-k), or where
 * too many tokens stay in reach, have all their logits computed.
 *
 * Meanwhile a row of the logits holds approximate scores; native.c computes the exact ones where somebody reads them.
 */
#include <stdlib.h>

#include "head_layout.h"
#include "rows.h"
#include "sample.h"

#define HEAD_SIGMAS (8.41f * 0.28867513f * 1.01f) /* of head_layout.h's bound; 1 % for the rounding of f32 */
#define HEAD_SPAN 16 /* chunks of an item of work */
#define HEAD_LIST 8192 /* tokens within reach at most */
_Static_assert(HEAD_CHUNK % (4 * VL) == 0, "a chunk is whole calls of gumbel()");

typedef enum {
    HEAD_GREEDY, /* the greatest logit */
    HEAD_NOISE, /* the greatest logit / temperature + noise */
    HEAD_WITHIN, /* draw from a list of all tokens above a threshold */
    HEAD_ALL, /* compute every logit */
} head_mode_t;

typedef struct {
    float value;
    int32_t token;
} scored_t;

/* What the threads share about one row of logits. */
typedef struct {
    draw_t draw;
    head_mode_t mode;
    float unit; /* what one step of the 16-bit activations stands for */
    float base; /* Σ offset · activation, in those steps */
    float slack; /* bound on the error of a score, over the row's step */
    float threshold; /* tokens certainly below it are out */
    _Atomic int32_t listed;
    scored_t list[HEAD_LIST];
} head_row_t;

/* The parts of the shared scratch, for a step of `rows`. */
typedef struct {
    int32_t *x; /* activations, in blocks of rows, as plane_tiles takes them */
    head_row_t *row;
    scored_t *tops; /* [rows][chunks]: the greatest of each chunk */
    scored_t *best; /* [threads][rows] */
} head_scratch_t;

/* Whether the row's logits are all to be computed. */
INLINE bool head_all(head_row_t *row) {
    return row->mode == HEAD_ALL || (row->mode == HEAD_WITHIN && row->listed > HEAD_LIST);
}

/* 16 bits of every activation. */
INLINE size_t head_x_bytes(int64_t rows, int64_t k) {
    return aligned_bytes((size_t)(rows * head_groups(k) * HEAD_COLUMNS), 2);
}

static head_scratch_t head_parts(const run_t *run, const dense_matmul_op_t *o, int64_t rows, size_t *bytes) {
    const size_t x = head_x_bytes(rows, o->x.columns), row = aligned_bytes((size_t)rows, sizeof(head_row_t));
    const size_t tops = aligned_bytes((size_t)(rows * chunks_of(o->out.columns)), sizeof(scored_t));
    uint8_t *base = run->shared;
    *bytes = x + row + tops + aligned_bytes((size_t)(rows * run->threads), sizeof(scored_t));
    return (head_scratch_t){
        (int32_t *)base, (head_row_t *)(base + x), (scored_t *)(base + x + row), (scored_t *)(base + x + row + tops)};
}

static need_t head_sample_need(const run_t *run, const op_t *op) {
    need_t need = sample_need(run, op->head_sample.sample);
    head_parts(run, &op->head_sample.dense->dense_matmul, run->program.limits.max_rows, &need.shared);
    const size_t q = aligned_bytes((size_t)op->head_sample.dense->dense_matmul.x.columns, sizeof(float));
    if (need.scratch < q) need.scratch = q;
    return need;
}

static head_mode_t head_mode(const draw_t *d, int64_t n) {
    if (d->temperature == 0) return HEAD_GREEDY;
    const bool top_k = d->top_k > 0 && d->top_k < n;
    if (top_k) return d->top_k <= HEAD_LIST / 8 && d->top_k <= chunks_of(n) ? HEAD_WITHIN : HEAD_ALL;
    if (d->top_p < 1) return HEAD_ALL;
    return d->min_p > 0 ? HEAD_WITHIN : HEAD_NOISE;
}

/* Row r's activations: 16-bit integers, as high and low bytes that stand side by side for plane_tiles. */
static void head_prepare(
    const run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, float *evened) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k), n = dense->out.columns;
    const float *x = (const float *)dense->x.data + r * dense->x.stride;
    head_row_t *row = &s->row[r];
    for (int64_t i = 0; i < k; i += VL) {
        const int part = k - i < VL ? (int)(k - i) : VL;
        v_store_part(evened + i, v_load_part(x + i, part) * v_load_part(o->column + i, part), part);
    }
    const float top = greatest_magnitude(evened, k), norm = (float)sqrt(sum_of_squares(evened, k));
    row->draw = draw_of(&run->step, r);
    row->mode = top < INFINITY && norm < INFINITY ? head_mode(&row->draw, n) : HEAD_ALL;
    row->unit = top / 32512.0f;
    row->slack = HEAD_SIGMAS * norm + 4.0f * (float)k * row->unit; /* |code - offset| <= 8, rounding <= unit / 2 */
    row->listed = 0;
    const float inverse = top > 0 ? 32512.0f / top : 0.0f;
    const int64_t first = r / (BLOCK_TOKENS / 2) * (BLOCK_TOKENS / 2);
    const int64_t rows = run->step.rows - first < BLOCK_TOKENS / 2 ? run->step.rows - first : BLOCK_TOKENS / 2;
    int32_t *to = s->x + first * groups * HEAD_COLUMNS / 2 + 2 * (r - first);
    double base = 0;
    for (int64_t i = 0; i < groups * HEAD_COLUMNS; i += 4, to += 2 * rows) {
        int8_t high[4] = {0}, low[4] = {0};
        for (int64_t j = 0; j < 4 && i + j < k; j++) {
            const int32_t q = (int32_t)lrintf(evened[i + j] * inverse);
            high[j] = (int8_t)((q + 128) >> 8);
            low[j] = (int8_t)(q - 256 * high[j]);
            base += (double)o->offset[i + j] * q;
        }
        memcpy(to, high, 4);
        memcpy(to + 1, low, 4);
    }
    row->base = (float)base;
}

static void head_tiles(const uint8_t *w, int64_t groups, const int32_t *x, int tokens, int32_t *acc) {
    switch (tokens) {
#define CASE(m) \
    case m: \
        plane_tiles(w, HEAD_PANEL_ROWS * 4, GEMM_TILES, groups, x, m, acc, HEAD_PANEL_ROWS, HEAD_BITS); \
        break;
        CASE(2) CASE(4)
#if BLOCK_TOKENS > 4
        CASE(6) CASE(8) CASE(10) CASE(12)
#endif
#undef CASE
    }
}

/* Approximate scores of the tokens of one panel. */
static void head_panel(const run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t panel) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k), begin = panel * HEAD_PANEL_ROWS;
    const int64_t left = dense->out.columns - begin, count = left < HEAD_PANEL_ROWS ? left : HEAD_PANEL_ROWS;
    int32_t acc[BLOCK_TOKENS * HEAD_PANEL_ROWS];
    for (int64_t first = 0; first < run->step.rows; first += BLOCK_TOKENS / 2) {
        const int64_t rows = run->step.rows - first < BLOCK_TOKENS / 2 ? run->step.rows - first : BLOCK_TOKENS / 2;
        const int32_t *x = s->x + first * groups * HEAD_COLUMNS / 2;
        head_tiles(o->codes + panel * head_panel_bytes(k), groups, x, (int)(2 * rows), acc);
        for (int64_t r = 0; r < rows; r++) {
            const head_row_t *row = &s->row[first + r];
            const int32_t *high = acc + 2 * r * HEAD_PANEL_ROWS, *low = high + HEAD_PANEL_ROWS;
            float *out = (float *)dense->out.data + (first + r) * dense->out.stride + begin;
            for (int64_t i = 0; i < count; i += VL) {
                const int part = count - i < VL ? (int)(count - i) : VL;
                const vf a = __builtin_convertvector(*(const vi_mem *)(high + i), vf);
                const vf b = __builtin_convertvector(*(const vi_mem *)(low + i), vf);
                const vf score = (a * 256.0f + b - row->base) * row->unit;
                v_store_part(out + i, score * v_load_part(o->step + begin + i, part), part);
            }
        }
    }
}

/* What a row's tokens compete by: the logit, or with noise added. */
INLINE float head_key(const head_row_t *row, float logit, float noise) {
    return row->mode == HEAD_NOISE ? logit / row->draw.temperature + noise : logit;
}

static float head_exact(const dense_matmul_op_t *dense, const head_row_t *row, int64_t token, int64_t r) {
    float noise[4 * VL];
    if (row->mode == HEAD_NOISE)
        gumbel(token / 4 * 4, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
    return head_key(row, dense_score(dense, token, r), row->mode == HEAD_NOISE ? noise[token % 4] : 0);
}

/* The greatest of a chunk; the scores become keys. */
static void head_top(const dense_matmul_op_t *dense, const head_scratch_t *s, int64_t r, int64_t chunk) {
    const head_row_t *row = &s->row[r];
    const int64_t begin = chunk * HEAD_CHUNK, n = dense->out.columns, end = begin + HEAD_CHUNK < n ? begin + HEAD_CHUNK : n;
    float *key = (float *)dense->out.data + r * dense->out.stride;
    for (int64_t i = begin; row->mode == HEAD_NOISE && i < end; i += 4 * VL) {
        float noise[4 * VL];
        gumbel(i, row->draw.position, row->draw.seed_lo, row->draw.seed_hi, noise);
        for (int64_t j = 0; j < 4 * VL && i + j < end; j++) key[i + j] = head_key(row, key[i + j], noise[j]);
    }
    /* A chunk stands for its greatest token, which is looked up only if it is wanted. */
    s->tops[r * chunks_of(n) + chunk] = (scored_t){greatest(key + begin, end - begin), (int32_t)chunk};
}

static int falling(const void *a, const void *b) {
    const float x = ((const scored_t *)a)->value, y = ((const scored_t *)b)->value;
    return (x < y) - (x > y);
}

/* Score the likeliest tokens of a row exactly: what they reach, the winner (or the last that may be drawn) reaches. */
static void head_threshold(const dense_matmul_op_t *dense, const head_scratch_t *s, int64_t r) {
    head_row_t *row = &s->row[r];
    const int64_t n = dense->out.columns, chunks = chunks_of(n);
    const float *keys = (const float *)dense->out.data + r * dense->out.stride;
    const draw_t *d = &row->draw;
    scored_t *tops = s->tops + r * chunks;
    const bool top_k = row->mode == HEAD_WITHIN && d->top_k > 0 && d->top_k < n;
    int64_t count = 1;
    if (top_k) {
        count = d->top_k;
        qsort(tops, (size_t)chunks, sizeof *tops, falling);
    } else {
        for (int64_t c = 1; c < chunks; c++)
            if (tops[c].value > tops[0].value) {
                const scored_t other = tops[0];
                tops[0] = tops[c];
                tops[c] = other;
            }
    }
    row->threshold = INFINITY;
    for (int64_t i = 0; i < count; i++) {
        const int64_t begin = tops[i].token * (int64_t)HEAD_CHUNK, left = n - begin < HEAD_CHUNK ? n - begin : HEAD_CHUNK;
        const float key = head_exact(dense, row, begin + lowest_index_of(keys + begin, tops[i].value, left), r);
        if (!(key >= row->threshold)) row->threshold = key;
    }
    if (row->mode == HEAD_WITHIN && !top_k) row->threshold += d->temperature * logf(d->min_p);
    /* What rounding to f32 may do to a key or a threshold. */
    row->threshold -= 1e-5f + 1e-6f * fabsf(row->threshold);
}

/* Of one chunk (the c-th in the order of `tops`), score exactly what may reach the threshold. */
static void head_filter(
    const dense_matmul_op_t *dense, const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t c,
    scored_t *best) {
    head_row_t *row = &s->row[r];
    const int64_t n = dense->out.columns;
    const scored_t top = s->tops[r * chunks_of(n) + c];
    const float slack = row->mode == HEAD_NOISE ? row->slack / row->draw.temperature : row->slack;
    /* Written so that what is not a number stays in. */
    if (top.value + slack * o->chunk_step[top.token] < row->threshold) return;
    const int64_t begin = top.token * (int64_t)HEAD_CHUNK, end = begin + HEAD_CHUNK < n ? begin + HEAD_CHUNK : n;
    const float *key = (const float *)dense->out.data + r * dense->out.stride;
    for (int64_t i = begin; i < end; i++) {
        if (key[i] + slack * o->step[i] < row->threshold) continue;
        const float exact = head_exact(dense, row, i, r);
        if (row->mode == HEAD_WITHIN) {
            const int32_t at = row->listed++;
            if (at >= HEAD_LIST) return;
            row->list[at] = (scored_t){exact, (int32_t)i};
        } else if (exact > best->value || (exact == best->value && i < best->token)) {
            *best = (scored_t){exact, (int32_t)i};
        }
    }
}

static int rising_token(const void *a, const void *b) {
    const int32_t x = ((const scored_t *)a)->token, y = ((const scored_t *)b)->token;
    return (x > y) - (x < y);
}

/* Draw from the list, in the order of the tokens, so that sums do not depend on who listed what when. */
static int32_t head_draw(head_row_t *row, float *z, float *p) {
    const int64_t n = row->listed;
    qsort(row->list, (size_t)n, sizeof *row->list, rising_token);
    for (int64_t i = 0; i < n; i++) z[i] = row->list[i].value / row->draw.temperature;
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
        return choose_token(&row->draw, (const float *)dense->out.data + r * dense->out.stride, dense->out.columns, z, p);
    if (row->mode == HEAD_WITHIN) return head_draw(row, z, p);
    scored_t best = s->best[r];
    for (int t = 1; t < run->threads; t++) {
        const scored_t other = s->best[t * (int64_t)run->step.rows + r];
        if (other.value > best.value || (other.value == best.value && other.token < best.token)) best = other;
    }
    return best.token == INT32_MAX ? 0 : best.token; /* of logits that are not numbers */
}

static stretch_t head_sample_begins(const run_t *run, const op_t *op, int thread) {
    const dense_matmul_op_t *dense = &op->head_sample.dense->dense_matmul;
    const int64_t panels = head_panels(dense->out.columns), bytes = head_panel_bytes(dense->x.columns);
    const uint8_t *codes = op->head_sample.codes;
    return (stretch_t){codes + pool_share(run->pool, thread, panels) * bytes, codes + panels * bytes};
}

static void head_sample(run_t *run, const op_t *op, int thread) {
    const head_sample_op_t *o = &op->head_sample;
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t rows = run->step.rows, n = dense->out.columns, chunks = chunks_of(n);
    if (rows == 0) return;
    size_t bytes;
    const head_scratch_t s = head_parts(run, dense, rows, &bytes);
    float *z = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    float *p = z + aligned_bytes((size_t)n + 4 * VL, sizeof(float)) / sizeof(float);
    for (int64_t r; (r = pool_take(run->pool, thread, rows)) >= 0;) head_prepare(run, o, &s, r, z);
    for (int64_t i = thread; i < run->threads * rows; i += run->threads) s.best[i] = (scored_t){-INFINITY, INT32_MAX};
    pool_barrier(run->pool);

    for (int64_t i; (i = pool_take(run->pool, thread, head_panels(n))) >= 0;) head_panel(run, o, &s, i);
    pool_barrier(run->pool);

    const int64_t spans = (chunks + HEAD_SPAN - 1) / HEAD_SPAN;
    for (int64_t i; (i = pool_take(run->pool, thread, rows * spans)) >= 0;)
        for (int64_t c = i % spans * HEAD_SPAN; c < chunks && c < (i % spans + 1) * HEAD_SPAN; c++)
            head_top(dense, &s, i / spans, c);
    pool_barrier(run->pool);

    for (int64_t r; (r = pool_take(run->pool, thread, rows)) >= 0;)
        if (s.row[r].mode != HEAD_ALL) head_threshold(dense, &s, r);
    pool_barrier(run->pool);

    for (int64_t i; (i = pool_take(run->pool, thread, rows * spans)) >= 0;)
        for (int64_t c = i % spans * HEAD_SPAN; c < chunks && c < (i % spans + 1) * HEAD_SPAN; c++)
            if (s.row[i / spans].mode != HEAD_ALL)
                head_filter(dense, o, &s, i / spans, c, &s.best[thread * rows + i / spans]);
    pool_barrier(run->pool);

    bool any = false;
    for (int64_t r = 0; r < rows; r++) any |= head_all(&s.row[r]);
    if (any) {
        for (int64_t i; (i = pool_take(run->pool, thread, rows * chunks)) >= 0;) {
            const int64_t r = i / chunks, first = i % chunks * HEAD_CHUNK;
            const int64_t end = first + HEAD_CHUNK < n ? first + HEAD_CHUNK : n;
            if (head_all(&s.row[r])) dense_chunk(dense, first, end, r, r + 1);
        }
        pool_barrier(run->pool);
    }
    for (int64_t r; (r = pool_take(run->pool, thread, rows)) >= 0;)
        o->sample->sample.out[r] = head_choose(run, o, &s, r, z, p);
}
