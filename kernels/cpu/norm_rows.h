/* norm_rows: out[r] = RMSNorm(x[rows[r]]), transformed if there is a transform: the rows that need logits. */
#include "transform.h"

static void norm_rows(run_t *run, const op_t *op, int thread) {
    const norm_rows_op_t *o = &op->norm_rows;
    const int64_t d = o->x.columns;
    for (int64_t r; (r = pool_take(run->pool, thread, run->step.rows)) >= 0;) {
        float *out = (float *)o->out.data + r * o->out.stride;
        norm_floats((const float *)o->x.data + (int64_t)run->step.row[r] * o->x.stride, o->weight, o->eps, out, d);
        if (o->transform.block) transform_row(&o->transform, 0, out, d);
    }
}
