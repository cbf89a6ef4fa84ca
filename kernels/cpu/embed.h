/* embed: out[m] = table[tokens[m]] as f32. */

static void embed(run_t *run, const op_t *op, int thread) {
    const embed_op_t *o = &op->embed;
    const int64_t d = o->out.columns;
    float *out = o->out.data;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        float *to = out + m * o->out.stride;
        const int64_t at = run->step.token[m] * d;
        if (!o->half) {
            memcpy(to, (const float *)o->table + at, (size_t)d * sizeof *to);
            continue;
        }
        const half_t *from = (const half_t *)o->table + at;
        int64_t i = 0;
        for (; i + VL <= d; i += VL) v_store(to + i, v_load_half(from + i));
        if (i < d) v_store_part(to + i, v_load_half_part(from + i, (int)(d - i)), (int)(d - i));
    }
}
