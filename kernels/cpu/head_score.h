/*
 * Scores of every row of a compact head, and a bound on the error of each.
 *
 * Activations, equalised like the weights, become 8-bit integers, rounded up or down by a separate dither:
 * each error is then centred, whatever the activation is, and of two values a unit apart, so sub-Gaussian with a variance
 * of at most 1/4 (Hoeffding 1963). Beside the error of 4-bit weights it is small.
 */
#ifndef BN_HEAD_SCORE_H
#define BN_HEAD_SCORE_H

#include "head_layout.h"
#include "sample.h"

#define HEAD_SIGMAS (7.5f * 1.01f) /* t of head_layout.h's bound; 1 % for the rounding of f32 */
#define HEAD_OTHER_DITHER 0x80000000u /* columns that no weight has: the dithers must not depend on each other */
#define HEAD_LIST 8192 /* maximum tokens within reach */

typedef enum {
    HEAD_GREEDY, /* the greatest logit */
    HEAD_NOISE, /* the greatest logit / temperature + noise */
    HEAD_CHECKED, /* the same, if top-p keeps it, or the next that it keeps: head_check.h */
    HEAD_DRAWN, /* its winner is certain */
    HEAD_AGAIN, /* no candidate passed: a list of the likelier ones is drawn from */
    HEAD_REPORTED, /* not drawn: the log-probabilities of a row are wanted (head_logprobs.h) */
    HEAD_WITHIN, /* draw from a list of all tokens above a threshold */
    HEAD_ALL, /* compute every logit */
} head_mode_t;

typedef struct {
    float value;
    int32_t token;
} scored_t;

/* What head_check.h keeps for a row of logits. */
typedef struct {
    float bet, spare, rows, peak, log_rate;
    float z; /* of the winner: its logit over the temperature */
    int32_t winner, stage;
} check_t;

#define CHECK_BINS 256

/* What a thread has found for a row of logits: tokens by the logarithm of their size, then logarithms of odds. */
typedef struct {
    int32_t bins[CHECK_BINS];
    float peak;
    double passes, fails;
} evidence_t;

/* The sum of e^z of the tokens of a chunk, and the variance of those of them that are rough (head_logprobs.h). */
typedef struct {
    double sum, squares;
} rest_t;

/* Shared by the threads: the state of one row of logits. */
typedef struct {
    draw_t draw;
    adjust_t adjust;
    head_mode_t mode;
    float unit; /* value of one step of the activations */
    float base; /* Σ offset · activation, in those steps */
    float slack, rest; /* of head_bound */
    float threshold; /* tokens certainly below it are out */
    int32_t logits; /* row of the logits */
    double mass; /* Σ e^z over e^peak, of a row whose log-probabilities are wanted */
    check_t check;
    _Atomic int32_t listed;
    scored_t list[HEAD_LIST];
} head_row_t;

/* The parts of the shared scratch, for a step of `rows`. */
typedef struct {
    int32_t *x; /* activations, in blocks of rows, as plane_tiles takes them */
    head_row_t *row;
    scored_t *tops; /* [rows][chunks]: the greatest of each chunk */
    scored_t *best; /* [threads][rows] */
    evidence_t *evidence; /* [threads][rows] */
    rest_t *rest; /* [rows][chunks]: of rows whose log-probabilities are wanted */
    int64_t rows; /* of the arrays: those of the step, and then one more for each whose log-probabilities are wanted */
} head_scratch_t;

/* Whether a row's tokens compete with noise. */
INLINE bool head_noisy(const head_row_t *row) { return row->mode == HEAD_NOISE || row->mode == HEAD_CHECKED; }

/* Whether its tokens are counted by size, and rows of the head taken for it. */
INLINE bool head_samples(const head_row_t *row) { return row->mode == HEAD_CHECKED || row->mode == HEAD_REPORTED; }

/* Whether its candidates are kept, not the best alone. */
INLINE bool head_lists(const head_row_t *row) { return row->mode == HEAD_WITHIN || row->mode == HEAD_AGAIN || head_samples(row); }

/* How far a key moves at most where its score moves by 1. */
INLINE float head_slope(const head_row_t *row) {
    const float repetition = row->adjust.marks ? row->adjust.repetition : 1.0f;
    const float slope = repetition > 1.0f ? repetition : 1.0f / repetition; /* of logits below 0, or above */
    return head_noisy(row) || row->mode == HEAD_AGAIN ? slope / row->draw.temperature : slope;
}

INLINE vf head_evened(const head_sample_op_t *o, const float *x, int64_t i, int n) {
    return v_load_part(x + i, n) * v_load_part(o->column + i, n);
}

/* Bound on how much too low a score may be, for a row with at most this step and a stored norm of at most `norm`. */
INLINE float head_bound(const head_row_t *row, float step, float norm) {
    const double weights = row->slack * step, activations = row->rest * norm;
    return (float)sqrt(weights * weights + activations * activations);
}

/* Quantise the activations of row r; false where they are NaN, or too small for their reciprocal. */
static bool head_quantise(const head_sample_op_t *o, const head_scratch_t *s, int64_t r, int64_t all) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k);
    const float *x = (const float *)dense->x.data + r * dense->x.stride;
    head_row_t *row = &s->row[r];
    vf tops = v_set(0.0f);
    vd squares = (vd)(0.0), base = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const vf evened = head_evened(o, x, i, k - i < VL ? (int)(k - i) : VL);
        tops = v_max(v_abs(evened), tops);
        squares += v_wide(evened) * v_wide(evened);
    }
    const float top = v_top(tops), norm = (float)sqrt(v_sum_double(squares));
    const float inverse = top > 0 ? 126.5f / top : 0.0f; /* plus half a step of dither: 127 */
    row->unit = top / 126.5f;
    row->slack = HEAD_SIGMAS * 0.28867513f * norm; /* 1 / √12 */
    row->rest = HEAD_SIGMAS * 0.5f * row->unit;
    const int64_t first = r / BLOCK_TOKENS * BLOCK_TOKENS, rows = all - first < BLOCK_TOKENS ? all - first : BLOCK_TOKENS;
    int32_t *to = s->x + first * groups * HEAD_COLUMNS / 4 + r - first;
    for (int64_t i = 0; i < groups * HEAD_COLUMNS; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        const vf whole = v_round(head_evened(o, x, i, n) * inverse + dither(HEAD_OTHER_DITHER + (uint32_t)i));
        base += v_wide(whole) * v_wide(v_load_part(o->offset + i, n));
        const vb codes = __builtin_convertvector(__builtin_convertvector(whole, vi), vb);
        for (int64_t j = 0; j < VL && i + j < groups * HEAD_COLUMNS; j += 4, to += rows)
            memcpy(to, (const int8_t *)&codes + j, 4);
    }
    row->base = (float)v_sum_double(base);
    return norm < INFINITY && inverse < INFINITY;
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
static void head_panel(const run_t *run, const head_sample_op_t *o, const head_scratch_t *s, int64_t panel) {
    const dense_matmul_op_t *dense = &o->dense->dense_matmul;
    const int64_t k = dense->x.columns, groups = head_groups(k), begin = panel * HEAD_PANEL_ROWS;
    const int64_t left = dense->out.columns - begin, count = left < HEAD_PANEL_ROWS ? left : HEAD_PANEL_ROWS;
    int32_t acc[BLOCK_TOKENS * HEAD_PANEL_ROWS];
    for (int64_t first = 0; first < run->step.rows; first += BLOCK_TOKENS) {
        const int64_t rows = run->step.rows - first < BLOCK_TOKENS ? run->step.rows - first : BLOCK_TOKENS;
        const int32_t *x = s->x + first * groups * HEAD_COLUMNS / 4;
        head_tiles(o->codes + panel * head_panel_bytes(k), groups, x, (int)rows, acc);
        for (int64_t r = 0; r < rows; r++) {
            const head_row_t *row = &s->row[first + r];
            const int32_t *sums = acc + r * HEAD_PANEL_ROWS;
            float *out = (float *)dense->out.data + (first + r) * dense->out.stride + begin;
            for (int64_t i = 0; i < count; i += VL) {
                const int part = count - i < VL ? (int)(count - i) : VL;
                const vf sum = __builtin_convertvector(*(const vi_mem *)(sums + i), vf) - row->base;
                v_store_part(out + i, sum * row->unit * v_load_part(o->step + begin + i, part), part);
            }
        }
    }
}

#endif
