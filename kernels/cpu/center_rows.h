/* center_rows: out[m] = x[m] minus the mean of x[m], for every token. */
#include "rows.h"

static void center_rows(run_t *run, const op_t *op, int thread) {
    const center_rows_op_t *o = &op->center_rows;
    const int64_t d = o->x.columns;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *x = (const float *)o->x.data + m * o->x.stride;
        float *out = (float *)o->out.data + m * o->out.stride;
        vd sum = (vd)(0.0);
        for (int64_t i = 0; i < d; i += VL) sum += v_wide(v_load_part(x + i, d - i < VL ? (int)(d - i) : VL));
        const double mean = v_sum_double(sum) / (double)d;
        for (int64_t i = 0; i < d; i += VL) {
            const int count = d - i < VL ? (int)(d - i) : VL;
            v_store_part(out + i, __builtin_convertvector(v_wide(v_load_part(x + i, count)) - mean, vf), count);
        }
    }
}
