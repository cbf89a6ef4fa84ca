/* gated_quant: RMSNorm of each head if there is a weight, times act(gate), then per-token absmax int8. */
#include "norm_quant.h"

static need_t gated_quant_need(const run_t *run, const op_t *op) {
    (void)run;
    return quant_need(op->gated_quant.x.columns);
}

/* The `d` elements of one head: to = norm(x) · act(gate); `silu` is a constant, `weight` the operation's or a constant NULL. */
INLINE void gated_head(
    const float *x, const float *gate, const float *weight, float eps, const int silu, float *to, int64_t d) {
    const double inverse = weight ? inverse_rms(sum_of_squares(x, d), d, eps) : 1.0;
    for (int64_t i = 0; i < d; i += VL) {
        const int n = d - i < VL ? (int)(d - i) : VL;
        vf a = v_load_part(x + i, n);
        if (weight) a = __builtin_convertvector(v_wide(a) * inverse * v_wide(v_load_part(weight + i, n)), vf);
        const vf z = v_load_part(gate + i, n);
        v_store_part(to + i, a * (silu ? z * v_sigmoid(z) : v_sigmoid(z)), n);
    }
}

static void gated_quant(run_t *run, const op_t *op, int thread) {
    const gated_quant_op_t *o = &op->gated_quant;
    const int64_t k = o->x.columns, d = o->head_dim, heads = k / d;
    double *wide = (double *)(run->scratch + (size_t)thread * run->scratch_bytes);
    float *y = quant_floats(wide, k);
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *x = (const float *)o->x.data + m * o->x.stride;
        const float *gate = (const float *)o->gate.data + m * o->gate.stride;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = o->untile ? h % o->untile * (heads / o->untile) + h / o->untile : h;
            if (o->weight && o->silu) gated_head(x + h * d, gate + h * d, o->weight, o->eps, 1, y + at * d, d);
            else if (o->weight) gated_head(x + h * d, gate + h * d, o->weight, o->eps, 0, y + at * d, d);
            else if (o->silu) gated_head(x + h * d, gate + h * d, NULL, o->eps, 1, y + at * d, d);
            else gated_head(x + h * d, gate + h * d, NULL, o->eps, 0, y + at * d, d);
        }
        int8_t *out = (int8_t *)o->out.data + m * o->out.stride;
        o->scale[m] = o->transform.block ? transformed_row(&o->transform, y, wide, out, k) : norm_row(y, NULL, 0.0f, wide, out, k);
    }
}
