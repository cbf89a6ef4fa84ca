/* norm_quant: RMSNorm where there is a weight, then per-token absmax int8. */
#include "rows.h"

static need_t norm_quant_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.scratch = aligned_bytes((size_t)op->norm_quant.x.columns + VL, sizeof(double))};
}

static void norm_quant(run_t *run, const op_t *op, int thread) {
    const norm_quant_op_t *o = &op->norm_quant;
    const int64_t k = o->x.columns;
    double *y = (double *)(run->scratch + (size_t)thread * run->scratch_bytes);
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *x = (const float *)o->x.data + m * o->x.stride;
        int8_t *out = (int8_t *)o->out.data + m * o->out.stride;
        o->scale[m] = o->weight ? quantise_row(x, sum_of_squares(x, k), o->weight, o->eps, y, out, k)
                                : quantise_row(x, 0, NULL, o->eps, y, out, k);
    }
}
