/*
 * Scores of every row of a compact head, and a bound on what each may be off by.
 *
 * Activations, evened out as the weights were, become 16-bit integers, high and low bytes side by side as plane_tiles takes
 * them; where many rows of activations share the weights, so that arithmetic is what takes time, 8 bits, if what these
 * leave out is little beside the error of the weights. What they leave out is known when they are made: its norm times
 * the norm of a stored row bounds what it adds to a score (Cauchy and Schwarz).
 */
#ifndef BN_HEAD_SCORE_H
#define BN_HEAD_SCORE_H

#include "head_layout.h"
#include "sample.h"

#define HEAD_SIGMAS (7.5f * 0.28867513f * 1.01f) /* of head_layout.h's bound; 1 % for the rounding of f32 */
#define HEAD_NARROW_ROWS 3 /* rows of activations from which on 8 bits may do */
#define HEAD_NARROW 0.6f /* the most that √k · residual may be of the norm for that: half as much again in doubt */
#define HEAD_LIST 8192 /* tokens within reach at most */

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
    float top, norm; /* of the evened activations */
    float unit; /* what one step of the integers stands for */
    float base; /* Σ offset · activation, in those steps */
    float slack, residual; /* the error of a score is at most step · slack + norm of the stored row · residual */
    float threshold; /* tokens certainly below it are out */
    bool narrow; /* 8 bits would do */
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

INLINE vf head_evened(const head_sample_op_t *o, const float *x, int64_t i, int n) {
    return v_load_part(x + i, n) * v_load_part(o->column + i, n);
}

/* How large row r's activations are, and whether 8 bits of them would do. */
static void head_measure(const head_sample_op_t *o, head_row_t *row, int64_t r) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns;
    const float *x = (const float *)dense->x.data + r * dense->x.stride;
    vf top = v_set(0.0f);
    vd squares = (vd)(0.0), rests = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const vf evened = head_evened(o, x, i, k - i < VL ? (int)(k - i) : VL);
        top = v_max(v_abs(evened), top);
        squares += v_wide(evened) * v_wide(evened);
    }
    row->top = v_top(top);
    row->norm = (float)sqrt(v_sum_double(squares));
    const float unit = row->top / 127.0f, inverse = row->top > 0 ? 127.0f / row->top : 0.0f;
    for (int64_t i = 0; i < k; i += VL) {
        const vf evened = head_evened(o, x, i, k - i < VL ? (int)(k - i) : VL);
        const vd rest = v_wide(evened - v_round(evened * inverse) * unit);
        rests += rest * rest;
    }
    row->narrow = sqrt(v_sum_double(rests) * (double)k) <= HEAD_NARROW * row->norm;
}

/* Bytes of each activation in this step: all threads come to the same. */
static int head_planes(const head_scratch_t *s, int64_t rows) {
    if (rows < HEAD_NARROW_ROWS) return 2;
    for (int64_t r = 0; r < rows; r++)
        if (!s->row[r].narrow) return 2;
    return 1;
}

/* Row r's activations, `planes` bytes each. */
static void head_write(
    const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t all, const int planes) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k), block = BLOCK_TOKENS / planes;
    const float *x = (const float *)dense->x.data + r * dense->x.stride;
    head_row_t *row = &s->row[r];
    const float most = planes == 1 ? 127.0f : 32512.0f, inverse = row->top > 0 ? most / row->top : 0.0f;
    row->unit = row->top / most;
    const int64_t first = r / block * block, rows = all - first < block ? all - first : block;
    int32_t *to = s->x + (first * groups * HEAD_COLUMNS / 4 + r - first) * planes;
    double base = 0, rests = 0;
    for (int64_t i = 0; i < groups * HEAD_COLUMNS; i += 4, to += planes * rows) {
        int8_t high[4] = {0}, low[4] = {0};
        for (int64_t j = 0; j < 4 && i + j < k; j++) {
            const float evened = x[i + j] * o->column[i + j];
            const int32_t q = (int32_t)rintf(evened * inverse);
            const double rest = (double)evened - (double)q * (double)row->unit;
            high[j] = (int8_t)(planes == 1 ? q : (q + 128) >> 8);
            low[j] = (int8_t)(q - 256 * high[j]);
            base += (double)o->offset[i + j] * q;
            rests += rest * rest;
        }
        memcpy(to, high, 4);
        if (planes == 2) memcpy(to + 1, low, 4);
    }
    row->base = (float)base;
    row->slack = HEAD_SIGMAS * row->norm;
    row->residual = (float)sqrt(rests) * 1.00001f;
}

/* All tiles of a panel at a time where their sums fit the registers: then memory is read front to back. */
INLINE void head_tiles_of(const uint8_t *w, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    const int tiles = tokens * MAX_TILES <= BLOCK_TOKENS * GEMM_TILES ? MAX_TILES : GEMM_TILES;
    for (int t = 0; t < MAX_TILES; t += tiles)
        plane_tiles(
            w + 4 * t * TILE_ROWS, 4 * HEAD_PANEL_ROWS, tiles, groups, x, tokens, acc + t * TILE_ROWS, HEAD_PANEL_ROWS,
            HEAD_BITS);
}

static void head_tiles(const uint8_t *w, int64_t groups, const int32_t *x, int tokens, int32_t *acc) {
    switch (tokens) {
#define CASE(m) \
    case m: head_tiles_of(w, groups, x, m, acc); break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if BLOCK_TOKENS > 4
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
}

/* Approximate scores of the tokens of one panel. */
static void head_panel(
    const run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t panel, const int planes) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k), begin = panel * HEAD_PANEL_ROWS;
    const int64_t left = dense->out.columns - begin, count = left < HEAD_PANEL_ROWS ? left : HEAD_PANEL_ROWS;
    const int64_t block = BLOCK_TOKENS / planes;
    int32_t acc[BLOCK_TOKENS * HEAD_PANEL_ROWS];
    for (int64_t first = 0; first < run->step.rows; first += block) {
        const int64_t rows = run->step.rows - first < block ? run->step.rows - first : block;
        const int32_t *x = s->x + first * groups * HEAD_COLUMNS / 4 * planes;
        head_tiles(o->codes + panel * head_panel_bytes(k), groups, x, (int)(planes * rows), acc);
        for (int64_t r = 0; r < rows; r++) {
            const head_row_t *row = &s->row[first + r];
            const int32_t *sums = acc + planes * r * HEAD_PANEL_ROWS;
            float *out = (float *)dense->out.data + (first + r) * dense->out.stride + begin;
            for (int64_t i = 0; i < count; i += VL) {
                const int part = count - i < VL ? (int)(count - i) : VL;
                vf sum = __builtin_convertvector(*(const vi_mem *)(sums + i), vf);
                if (planes == 2)
                    sum = sum * 256.0f + __builtin_convertvector(*(const vi_mem *)(sums + HEAD_PANEL_ROWS + i), vf);
                v_store_part(out + i, (sum - row->base) * row->unit * v_load_part(o->step + begin + i, part), part);
            }
        }
    }
}

#endif
