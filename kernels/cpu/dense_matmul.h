#ifndef BN_DENSE_MATMUL_H
#define BN_DENSE_MATMUL_H

/* dense_matmul: out[R, N] = x · Wᵀ for the rows that need logits; weights f16 or f32, row-major as in the file. */

#define DENSE_ROWS 4 /* weight rows together: they share the loads of x */
#define DENSE_TOKENS 4 /* x rows together: they share the weights */
#define DENSE_CHUNK 64 /* weight rows an item of work */

INLINE vf weight_load(const void *w, int64_t at, int n, const int half) {
    return half ? v_load_half_part((const half_t *)w + at, n) : v_load_part((const float *)w + at, n);
}

/* Scores of `rows` weight rows from n on by `tokens` x rows from r on, both constants: to[m · pitch + i]. Each is summed in
 * the same order whatever the block. */
INLINE void dense_block(
    const dense_matmul_op_t *o, int64_t n, int64_t r, const int half, const int rows, const int tokens, float *to,
    int64_t pitch) {
    const int64_t k = o->x.columns;
    const float *x = (const float *)o->x.data + r * o->x.stride;
    vf sum[DENSE_ROWS][DENSE_TOKENS];
    for (int i = 0; i < rows; i++)
        for (int m = 0; m < tokens; m++) sum[i][m] = v_set(0.0f);
    for (int64_t e = 0; e < k; e += VL) {
        const int rest = k - e < VL ? (int)(k - e) : VL;
        vf y[DENSE_TOKENS];
        for (int m = 0; m < tokens; m++) y[m] = v_load_part(x + m * o->x.stride + e, rest);
        for (int i = 0; i < rows; i++) {
            const vf w = weight_load(o->weight, (n + i) * k + e, rest, half);
            for (int m = 0; m < tokens; m++) sum[i][m] = v_fma(w, y[m], sum[i][m]);
        }
    }
    for (int m = 0; m < tokens; m++)
        for (int i = 0; i < rows; i++) to[m * pitch + i] = v_sum(sum[i][m]);
}

/* One score. */
static float dense_score(const dense_matmul_op_t *o, int64_t n, int64_t r) {
    float score;
    if (o->half) dense_block(o, n, r, 1, 1, 1, &score, 1);
    else dense_block(o, n, r, 0, 1, 1, &score, 1);
    return score;
}

INLINE void dense_rows(const dense_matmul_op_t *o, int64_t n, int64_t end, int64_t r, const int half, const int tokens) {
    const int64_t pitch = o->out.stride;
    float *out = (float *)o->out.data + r * pitch;
    for (; n + DENSE_ROWS <= end; n += DENSE_ROWS) dense_block(o, n, r, half, DENSE_ROWS, tokens, out + n, pitch);
    for (; n < end; n++) dense_block(o, n, r, half, 1, tokens, out + n, pitch);
}

/* The weight rows n … end - 1 by the x rows r … stop - 1. */
static void dense_chunk(const dense_matmul_op_t *o, int64_t n, int64_t end, int64_t r, int64_t stop) {
    for (; r + DENSE_TOKENS <= stop; r += DENSE_TOKENS) {
        if (o->half) dense_rows(o, n, end, r, 1, DENSE_TOKENS);
        else dense_rows(o, n, end, r, 0, DENSE_TOKENS);
    }
    for (; r < stop; r++) {
        if (o->half) dense_rows(o, n, end, r, 1, 1);
        else dense_rows(o, n, end, r, 0, 1);
    }
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
