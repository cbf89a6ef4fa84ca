/* norm_tokens: out[m] = RMSNorm(x[m]) for every token, replaced or added to. */
#include "rows.h"

static void norm_tokens(run_t *run, const op_t *op, int thread) {
    const norm_tokens_op_t *o = &op->norm_tokens;
    const int64_t d = o->x.columns;
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *x = (const float *)o->x.data + m * o->x.stride;
        float *out = (float *)o->out.data + m * o->out.stride;
        const double inverse = inverse_rms(sum_of_squares(x, d), d, o->eps);
        for (int64_t i = 0; i < d; i += VL) {
            const int n = d - i < VL ? (int)(d - i) : VL;
            const vd normed = v_wide(v_load_part(x + i, n)) * inverse * v_wide(v_load_part(o->weight + i, n));
            const vf rounded = __builtin_convertvector(normed, vf);
            v_store_part(out + i, o->add ? v_load_part(out + i, n) + rounded : rounded, n);
        }
    }
}
