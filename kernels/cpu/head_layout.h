/*
 * The compact head: a matrix of floats in 4 bits a weight, with a bound on the error of each score.
 *
 * Row n is stored as codes 0 … 15: W[n, k] ≈ column[k] · step[n] · (code - offset[k]). `column` equalises columns of
 * different magnitudes; `step` is the row's greatest equalised magnitude, over 7.5; `offset` is 7.5 plus a dither,
 * uniform in [-½, ½), that does not depend on the weights. So the error of every weight, over column · step, is uniform
 * in [-½, ½) and independent from column to column (subtractive dither: Schuchman 1964), whatever the weights are.
 *
 * Then the error of a score Σ W[n, k] x[k] is a sum of independent, centred, bounded terms, sub-Gaussian with the variance
 * of the uniform distribution: too low by more than step[n] ‖column · x‖ t / √12 with probability at most e^(-t²/2). What
 * rounding the activations adds (head_score.h) is of the same kind, and the two variances add up. With t = 7.5 the
 * probability is 2^-40: head_sample.h re-scores in full precision whatever this leaves in doubt. ADR 0060 has the proof.
 */
#ifndef BN_HEAD_LAYOUT_H
#define BN_HEAD_LAYOUT_H

#include "dense_matmul.h"
#include "rows.h"

#define HEAD_BITS 4
#define HEAD_COLUMNS 8 /* columns of a tile: two planes of four */
#define HEAD_PANEL_ROWS (MAX_TILES * TILE_ROWS)
#define HEAD_CHUNK 64 /* rows that share one greatest step and norm, and one greatest score */
#define HEAD_SAMPLED_ROWS 4096 /* rows, about, that a column's size is estimated from */
#define HEAD_PARTS 16

INLINE int64_t head_groups(int64_t columns) { return (columns + HEAD_COLUMNS - 1) / HEAD_COLUMNS; }
INLINE int64_t head_panels(int64_t rows) { return (rows + HEAD_PANEL_ROWS - 1) / HEAD_PANEL_ROWS; }
INLINE int64_t chunks_of(int64_t rows) { return (rows + HEAD_CHUNK - 1) / HEAD_CHUNK; }
INLINE int64_t head_panel_bytes(int64_t columns) { return head_groups(columns) * HEAD_PANEL_ROWS * 4; }

static size_t head_bytes(int64_t rows, int64_t columns) {
    return (size_t)(head_panels(rows) * head_panel_bytes(columns));
}

/* Dithers in [-½, ½) of the columns from k on: multiples of the golden ratio, hashed. */
INLINE vf dither(uint32_t k) {
    vu a;
    for (int i = 0; i < VL; i++) a[i] = k + 1 + (uint32_t)i;
    a *= 0x9E3779B9u;
    a = (a ^ a >> 16) * 0x85EBCA6Bu;
    a = (a ^ a >> 13) * 0xC2B2AE35u;
    return __builtin_convertvector((a ^ a >> 16) >> 8, vf) * 0x1p-24f - 0.5f;
}

/* Σ W[n, k]² over a part of the sampled rows, of each column; the parts do not depend on the number of threads. `weights` is
 * scratch. */
static void head_squares(const head_pack_t *job, int64_t part, double *sums, float *weights) {
    const int64_t k = job->columns, stride = job->rows / HEAD_SAMPLED_ROWS + 1;
    memset(sums, 0, (size_t)k * sizeof *sums);
    for (int64_t row = part * stride; row < job->rows; row += HEAD_PARTS * stride) {
        weight_row(job->weight, (int)job->type, row, k, weights);
        for (int64_t i = 0; i < k; i += VL) {
            const int n = k - i < VL ? (int)(k - i) : VL;
            const vd a = __builtin_convertvector(v_load_part(weights + i, n), vd);
            for (int j = 0; j < n; j++) sums[i + j] += a[j] * a[j];
        }
    }
}

static void head_column(const head_pack_t *job, int64_t k) {
    double sum = 0;
    for (int part = 0; part < HEAD_PARTS; part++) sum += job->squares[part * job->columns + k];
    const float rms = (float)sqrt(sum / HEAD_SAMPLED_ROWS);
    job->column[k] = rms > 0 && rms < INFINITY ? rms : 1.0f;
    job->offset[k] = 7.5f + dither((uint32_t)k)[0];
}

/* Pack one row's codes, four columns in the low and four in the high bits of a lane; `evened` and `codes` are scratch. Returns
 * a bound on the norm of the stored row, step · (code - offset) over the columns, that holds for every dither. */
static float head_row(const head_pack_t *job, int64_t row, uint8_t *to, float *evened, uint8_t *codes) {
    const int64_t k = job->columns;
    weight_row(job->weight, (int)job->type, row, k, evened);
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        v_store_part(evened + i, v_load_part(evened + i, n) / v_load_part(job->column + i, n), n);
    }
    const float step = any_nan(evened, k) ? INFINITY : greatest_magnitude(evened, k) * (1.000001f / 7.5f);
    const float inverse = step > 0 && step < INFINITY ? 1.0f / step : 0.0f;
    job->step[row] = step; /* infinite: always in doubt */
    vd squares = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        const vf units = v_load_part(evened + i, n) * inverse, code = units + v_load_part(job->offset + i, n);
        const vf whole = v_round(v_max(v_min(code, v_set(15.0f)), v_set(0.0f)));
        squares += v_wide(units) * v_wide(units);
        const vb bytes = __builtin_convertvector(__builtin_convertvector(whole, vi), vb);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
    memset(codes + k, 0, HEAD_COLUMNS);
    for (int64_t g = 0; g < head_groups(k); g++) {
        uint32_t low, high;
        memcpy(&low, codes + g * HEAD_COLUMNS, sizeof low);
        memcpy(&high, codes + g * HEAD_COLUMNS + 4, sizeof high);
        low |= high << 4;
        memcpy(to + g * HEAD_PANEL_ROWS * 4, &low, sizeof low);
    }
    return (float)((sqrt(v_sum_double(squares)) + 0.5 * sqrt((double)k)) * 1.000001) * job->step[row];
}

INLINE size_t head_scratch_bytes(int64_t columns) { return aligned_bytes((size_t)columns + 2 * VL, 5); }

/* Scratch for packing on so many threads. */
static size_t head_pack_scratch(int64_t columns, int threads) {
    return HEAD_PARTS * (size_t)columns * sizeof(double) + (size_t)threads * head_scratch_bytes(columns);
}

static void head_pack(pool_t *pool, const head_pack_t *job, int thread) {
    const int64_t k = job->columns;
    float *evened = (float *)((uint8_t *)(job->squares + HEAD_PARTS * k) + (size_t)thread * head_scratch_bytes(k));
    uint8_t *codes = (uint8_t *)(evened + k + VL);
    for (int64_t part; (part = pool_take(pool, thread, HEAD_PARTS)) >= 0;)
        head_squares(job, part, job->squares + part * k, evened);
    pool_barrier(pool, thread);
    for (int64_t i; (i = pool_take(pool, thread, k)) >= 0;) head_column(job, i);
    pool_barrier(pool, thread);
    for (int64_t c; (c = pool_take(pool, thread, chunks_of(job->rows))) >= 0;) {
        float step = 0, norm = 0;
        for (int64_t row = c * HEAD_CHUNK; row < (c + 1) * HEAD_CHUNK && row < job->rows; row++) {
            const int64_t panel = row / HEAD_PANEL_ROWS;
            uint8_t *to = job->codes + panel * head_panel_bytes(k) + 4 * (row % HEAD_PANEL_ROWS);
            const float own = head_row(job, row, to, evened, codes);
            step = job->step[row] > step ? job->step[row] : step;
            norm = own > norm ? own : norm;
        }
        job->chunk_step[c] = step;
        job->chunk_norm[c] = norm;
    }
}

#endif
