/* embed: out[m] = table[tokens[m]] as f32; a transform is undone. */
#include "transform.h"
#include "weights.h"

/* A row of ternary blocks as a file has them. */
static void ternary_row(const code_blocks_t *blocks, const uint8_t *from, int64_t columns, float *to) {
    const int step = blocks->base == 2 ? 2 : 1;
    for (const float *end = to + columns; to < end; from += blocks->size, to += blocks->columns) {
        const float scale = half_at(from + blocks->scale_at);
        for (int i = 0; i < blocks->columns; i++) {
            const uint8_t fraction = (uint8_t)(from[blocks->place[i]] * blocks->factor[i]);
            to[i] = (float)(step * (fraction * blocks->base >> 8) - 1) * scale;
        }
    }
}

static void embed(run_t *run, const op_t *op, int thread) {
    const embed_op_t *o = &op->embed;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *to = (float *)o->out.data + m * o->out.stride;
        const int64_t row = run->step.token[m], columns = o->out.columns;
        if (o->blocks)
            ternary_row(
                o->blocks, (const uint8_t *)o->table + row * (columns / o->blocks->columns * o->blocks->size), columns, to);
        else
            weight_row(o->table, o->type, row, columns, to);
        if (o->transform.block) transform_row(&o->transform, 1, to, o->out.columns);
    }
}
