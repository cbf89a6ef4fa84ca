/* add_bias: x[m] += bias, for every token. */
#include "rows.h"

static void add_bias(run_t *run, const op_t *op, int thread) {
    const add_bias_op_t *o = &op->add_bias;
    const int64_t n = o->x.columns;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *x = (float *)o->x.data + m * o->x.stride;
        for (int64_t i = 0; i < n; i += VL) {
            const int count = n - i < VL ? (int)(n - i) : VL;
            v_store_part(x + i, v_load_part(x + i, count) + v_load_part(o->bias + i, count), count);
        }
    }
}
