/* norm_quant: RMSNorm if there is a weight, then per-token absmax int8. */
#ifndef BN_NORM_QUANT_H
#define BN_NORM_QUANT_H

#include "transform.h"

/* A row of doubles and one of floats. */
INLINE need_t quant_need(int64_t columns) {
    const size_t k = (size_t)columns + VL;
    return (need_t){.scratch = aligned_bytes(k, sizeof(double)) + aligned_bytes(k, sizeof(float))};
}

/* The floats of this scratch. */
INLINE float *quant_floats(double *y, int64_t columns) {
    return (float *)((uint8_t *)y + aligned_bytes((size_t)columns + VL, sizeof(double)));
}

static need_t norm_quant_need(const run_t *run, const op_t *op) {
    (void)run;
    return quant_need(op->norm_quant.x.columns);
}

/* Quantise one row; `y` is scratch, and `weight` the operation's or a constant NULL. Returns the scale. */
INLINE float norm_row(const float *x, const float *weight, float eps, double *y, int8_t *out, int64_t k) {
    seen_t seen = {0};
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        see(&seen, v_wide(v_load_part(x + i, n)), weight ? weight + i : NULL, y + i, n);
    }
    return quantise_row(seen, y, weight != NULL, eps, out, k);
}

/* The same of a row of floats after a transform. */
static float transformed_row(const transform_t *t, float *row, double *y, int8_t *out, int64_t k) {
    transform_row(t, 0, row, k);
    return norm_row(row, NULL, 0.0f, y, out, k);
}

static void norm_quant(run_t *run, const op_t *op, int thread) {
    const norm_quant_op_t *o = &op->norm_quant;
    const int64_t k = o->x.columns;
    double *y = (double *)(run->scratch + (size_t)thread * run->scratch_bytes);
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *x = (const float *)o->x.data + m * o->x.stride;
        int8_t *out = (int8_t *)o->out.data + m * o->out.stride;
        if (o->transform.block) {
            float *row = quant_floats(y, k);
            if (o->weight) norm_floats(x, o->weight, o->eps, row, k);
            else memcpy(row, x, (size_t)k * sizeof *row);
            o->scale[m] = transformed_row(&o->transform, row, y, out, k);
            continue;
        }
        o->scale[m] = o->weight ? norm_row(x, o->weight, o->eps, y, out, k) : norm_row(x, NULL, o->eps, y, out, k);
    }
}

#endif
