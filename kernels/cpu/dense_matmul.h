#ifndef BN_DENSE_MATMUL_H
#define BN_DENSE_MATMUL_H

/* dense_matmul: out[R, N] = x · Wᵀ for the rows that need logits; weights f16, f32 or blocks, row-major as in the file. */

#include "weights.h"

#define DENSE_ROWS 4 /* weight rows together: they share the loads of x */
#define DENSE_TOKENS 4 /* x rows together: they share the weights */
#define DENSE_CHUNK 64 /* weight rows an item of work */
#define DENSE_FOLD (16 * VL) /* columns that are summed by themselves, so that a long row has few roundings */

INLINE vf weight_load(const void *w, int64_t at, int n, const int half) {
    return half ? v_load_half_part((const half_t *)w + at, n) : v_load_part((const float *)w + at, n);
}

typedef vf dense_sums_t[DENSE_ROWS][DENSE_TOKENS];

/* sum[i][m] += w · x over `count` columns. Rows of the weights stand `k` elements apart; `at` is the first element. */
INLINE void dense_add(
    const void *w, int64_t at, int64_t k, const int half, const int rows, const int tokens, const float *x, int64_t stride,
    int64_t count, dense_sums_t sum) {
    for (int64_t e = 0; e < count; e += VL) {
        const int rest = count - e < VL ? (int)(count - e) : VL;
        vf y[DENSE_TOKENS];
        for (int m = 0; m < tokens; m++) y[m] = v_load_part(x + m * stride + e, rest);
        for (int i = 0; i < rows; i++) {
            const vf a = weight_load(w, at + i * k + e, rest, half);
            for (int m = 0; m < tokens; m++) sum[i][m] = v_fma(a, y[m], sum[i][m]);
        }
    }
}

/* The same over a span, some columns by themselves. */
INLINE void dense_span(
    const void *w, int64_t at, int64_t k, const int half, const int rows, const int tokens, const float *x, int64_t stride,
    int64_t count, dense_sums_t sum) {
    for (int64_t c = 0; c < count; c += DENSE_FOLD) {
        dense_sums_t few;
        for (int i = 0; i < rows; i++)
            for (int m = 0; m < tokens; m++) few[i][m] = v_set(0.0f);
        dense_add(w, at + c, k, half, rows, tokens, x + c, stride, count - c < DENSE_FOLD ? count - c : DENSE_FOLD, few);
        for (int i = 0; i < rows; i++)
            for (int m = 0; m < tokens; m++) sum[i][m] += few[i][m];
    }
}

/* Scores of `rows` weight rows from n on by `tokens` x rows from r on, both constants: to[m · pitch + i]. Each is summed in
 * the same order whatever the block and the type of the weights. `type` is a constant but for blocks. */
INLINE void dense_block(
    const dense_matmul_op_t *o, int64_t n, int64_t r, const int type, const int rows, const int tokens, float *to,
    int64_t pitch) {
    const int64_t k = o->x.columns, stride = o->x.stride;
    const float *x = (const float *)o->x.data + r * stride;
    dense_sums_t sum;
    for (int i = 0; i < rows; i++)
        for (int m = 0; m < tokens; m++) sum[i][m] = v_set(0.0f);
    for (int64_t e = 0; e < k; e += SPAN_COLUMNS) {
        const int64_t count = k - e < SPAN_COLUMNS ? k - e : SPAN_COLUMNS;
        if (in_blocks(type)) {
            const int64_t bytes = weight_bytes(type, k);
            const uint8_t *w = (const uint8_t *)o->weight + n * bytes;
            float part[DENSE_ROWS * SPAN_COLUMNS];
            for (int i = 0; i < rows; i++)
                decode_blocks(type, w + i * bytes + weight_bytes(type, e), count, part + i * SPAN_COLUMNS);
            dense_span(part, 0, SPAN_COLUMNS, 0, rows, tokens, x + e, stride, count, sum);
        } else {
            dense_span(o->weight, n * k + e, k, type == WEIGHT_F16, rows, tokens, x + e, stride, count, sum);
        }
    }
    for (int m = 0; m < tokens; m++)
        for (int i = 0; i < rows; i++) to[m * pitch + i] = v_sum(sum[i][m]);
}

/* `call` with the type of the weights as `type`, a constant for floats. */
#define DENSE_BY_TYPE(o, call) \
    do { \
        if ((o)->type == WEIGHT_F32) { \
            const int type = WEIGHT_F32; \
            call; \
        } else if ((o)->type == WEIGHT_F16) { \
            const int type = WEIGHT_F16; \
            call; \
        } else { \
            const int type = (o)->type; \
            call; \
        } \
    } while (0)

/* One score. */
static float dense_score(const dense_matmul_op_t *o, int64_t n, int64_t r) {
    float score;
    DENSE_BY_TYPE(o, dense_block(o, n, r, type, 1, 1, &score, 1));
    return score;
}

INLINE void dense_rows(const dense_matmul_op_t *o, int64_t n, int64_t end, int64_t r, const int type, const int tokens) {
    const int64_t pitch = o->out.stride;
    float *out = (float *)o->out.data + r * pitch;
    for (; n + DENSE_ROWS <= end; n += DENSE_ROWS) dense_block(o, n, r, type, DENSE_ROWS, tokens, out + n, pitch);
    for (; n < end; n++) dense_block(o, n, r, type, 1, tokens, out + n, pitch);
}

/* The weight rows n … end - 1 by the x rows r … stop - 1. */
static void dense_chunk(const dense_matmul_op_t *o, int64_t n, int64_t end, int64_t r, int64_t stop) {
    for (; r + DENSE_TOKENS <= stop; r += DENSE_TOKENS) DENSE_BY_TYPE(o, dense_rows(o, n, end, r, type, DENSE_TOKENS));
    for (; r < stop; r++) DENSE_BY_TYPE(o, dense_rows(o, n, end, r, type, 1));
}

static void dense_matmul(run_t *run, const op_t *op, int thread) {
    const dense_matmul_op_t *o = &op->dense_matmul;
    if (run->step.rows == 0) return;
    const int64_t chunks = (o->out.columns + DENSE_CHUNK - 1) / DENSE_CHUNK;
    for (int64_t chunk; (chunk = pool_take(run->pool, thread, chunks)) >= 0;) {
        const int64_t n = chunk * DENSE_CHUNK;
        const int64_t end = n + DENSE_CHUNK < o->out.columns ? n + DENSE_CHUNK : o->out.columns;
        dense_chunk(o, n, end, 0, run->step.rows);
    }
}

#endif
