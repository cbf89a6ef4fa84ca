/* embed: out[m] = table[tokens[m]] as f32; a transform is undone. */
#include "transform.h"
#include "weights.h"

static void embed(run_t *run, const op_t *op, int thread) {
    const embed_op_t *o = &op->embed;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *to = (float *)o->out.data + m * o->out.stride;
        weight_row(o->table, o->type, run->step.token[m], o->out.columns, to);
        if (o->transform.block) transform_row(&o->transform, 1, to, o->out.columns);
    }
}
