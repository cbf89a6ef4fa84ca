/* embed: out[m] = table[tokens[m]] as f32; a transform is undone. */
#include "transform.h"

static void embed_row(const embed_op_t *o, int64_t at, float *to) {
    const int64_t d = o->out.columns;
    if (!o->half) {
        memcpy(to, (const float *)o->table + at, (size_t)d * sizeof *to);
        return;
    }
    const half_t *from = (const half_t *)o->table + at;
    int64_t i = 0;
    for (; i + VL <= d; i += VL) v_store(to + i, v_load_half(from + i));
    if (i < d) v_store_part(to + i, v_load_half_part(from + i, (int)(d - i)), (int)(d - i));
}

static void embed(run_t *run, const op_t *op, int thread) {
    const embed_op_t *o = &op->embed;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *to = (float *)o->out.data + m * o->out.stride;
        embed_row(o, run->step.token[m] * o->out.columns, to);
        if (o->transform.block) transform_row(&o->transform, 1, to, o->out.columns);
    }
}
