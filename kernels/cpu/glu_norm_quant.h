/* glu_norm_quant: act(gate) · up, RMSNorm where there is a weight, then per-token absmax int8. */
#include "rows.h"

static need_t glu_norm_quant_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.scratch = aligned_bytes((size_t)op->glu_norm_quant.out.columns + VL, sizeof(double))};
}

INLINE vd glu(vf gate, vf up, int silu) {
    if (silu) return v_wide(gate / (1.0f + v_exp(-gate)) * up);
    const vd positive = v_wide(v_max(gate, v_set(0.0f)));
    return positive * positive * v_wide(up);
}

/* One row; `silu` is a constant, `y` scratch. Returns the scale. */
INLINE float glu_row(const glu_norm_quant_op_t *o, const float *gate, const int silu, double *y, int8_t *out) {
    const int64_t f = o->out.columns;
    const float *up = gate + f;
    vd sum = (vd)(0.0), top = (vd)(0.0);
    for (int64_t i = 0; i < f; i += VL) {
        const int n = f - i < VL ? (int)(f - i) : VL;
        const vd a = glu(v_load_part(gate + i, n), v_load_part(up + i, n), silu);
        *(vd_mem *)(y + i) = a;
        sum += a * a;
        if (!o->weight) top = v_max_wide(v_abs_wide(a), top);
    }
    if (o->weight) {
        const double inverse = inverse_rms(v_sum_double(sum), f, o->eps);
        for (int64_t i = 0; i < f; i += VL) {
            const int n = f - i < VL ? (int)(f - i) : VL;
            const vd a = *(const vd_mem *)(y + i) * inverse * v_wide(v_load_part(o->weight + i, n));
            *(vd_mem *)(y + i) = a;
            top = v_max_wide(v_abs_wide(a), top);
        }
    }
    const absmax_t q = absmax_of(v_top_wide(top));
    for (int64_t i = 0; i < f; i += VL)
        store_codes(out + i, *(const vd_mem *)(y + i), q.factor, f - i < VL ? (int)(f - i) : VL);
    return q.scale;
}

static void glu_norm_quant(run_t *run, const op_t *op, int thread) {
    const glu_norm_quant_op_t *o = &op->glu_norm_quant;
    double *y = (double *)(run->scratch + (size_t)thread * run->scratch_bytes);
    for (int64_t m; (m = pool_take(run->pool, thread, run->step.tokens)) >= 0;) {
        const float *gate = (const float *)o->gate_up.data + m * o->gate_up.stride;
        int8_t *out = (int8_t *)o->out.data + m * o->out.stride;
        o->scale[m] = o->silu ? glu_row(o, gate, 1, y, out) : glu_row(o, gate, 0, y, out);
    }
}
