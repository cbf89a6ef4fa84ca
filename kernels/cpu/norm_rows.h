/* norm_rows: out[r] = RMSNorm(x[rows[r]]), the rows that need logits. */
#include "rows.h"

INLINE double sum_of_squares(const float *x, int64_t k) {
    vd sum = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const vd a = v_wide(v_load_part(x + i, k - i < VL ? (int)(k - i) : VL));
        sum += a * a;
    }
    return v_sum_double(sum);
}

static void norm_rows(run_t *run, const op_t *op, int thread) {
    const norm_rows_op_t *o = &op->norm_rows;
    const int64_t d = o->x.columns;
    for (int64_t r; (r = pool_take(run->pool, thread, run->step.rows)) >= 0;) {
        const float *x = (const float *)o->x.data + (int64_t)run->step.row[r] * o->x.stride;
        float *out = (float *)o->out.data + r * o->out.stride;
        const double inverse = inverse_rms(sum_of_squares(x, d), d, o->eps);
        for (int64_t i = 0; i < d; i += VL) {
            const int n = d - i < VL ? (int)(d - i) : VL;
            const vd a = v_wide(v_load_part(x + i, n)) * inverse * v_wide(v_load_part(o->weight + i, n));
            v_store_part(out + i, __builtin_convertvector(a, vf), n);
        }
    }
}
