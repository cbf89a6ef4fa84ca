/* glu_norm_quant: act(gate) · up, RMSNorm if there is a weight, then per-token absmax int8. */
#include "norm_quant.h"

static need_t glu_norm_quant_need(const run_t *run, const op_t *op) {
    (void)run;
    return quant_need(op->glu_norm_quant.out.columns / op->glu_norm_quant.parts);
}

INLINE vd glu(vf gate, vf up, int activation) {
    if (activation == ACTIVATION_SILU) return v_wide(gate / (1.0f + v_exp(-gate)) * up);
    if (activation == ACTIVATION_GELU) { /* (1 + tanh z) / 2 is the sigmoid of 2z; far from 0, v_exp multiplies errors of z */
        const vd g = v_wide(gate), slope = g * (1.5957691216057308 + 0.07135481627260025 * g * g);
        return g / v_wide(1.0f + v_exp(__builtin_convertvector(-slope, vf))) * v_wide(up);
    }
    const vd positive = v_wide(v_max(gate, v_set(0.0f)));
    return positive * positive * v_wide(up);
}

/* One row; `activation` is a constant, `weight` the operation's or a constant NULL, `y` scratch. Returns the scale. */
INLINE float glu_row(
    const glu_norm_quant_op_t *o, const float *gate, const float *weight, const int activation, double *y, int8_t *out) {
    const int64_t f = o->out.columns / o->parts;
    const vf most = v_set(o->clamp > 0.0f ? o->clamp : INFINITY);
    seen_t seen = {0};
    for (int64_t i = 0; i < f; i += VL) {
        const int n = f - i < VL ? (int)(f - i) : VL;
        const vf g = v_load_part(gate + i, n), u = v_load_part(gate + f + i, n); /* NaN is not above a limit */
        const vd a = glu(g > most ? most : g, u > most ? most : u < -most ? -most : u, activation);
        see(&seen, a, weight ? weight + i : NULL, y + i, n);
    }
    if (o->transform.block) {
        const double inverse = weight ? inverse_rms(v_sum_double(seen.squares), f, o->eps) : 1.0;
        float *row = quant_floats(y, f);
        for (int64_t i = 0; i < f; i += VL)
            v_store_part(row + i, __builtin_convertvector(*(const vd_mem *)(y + i) * inverse, vf), f - i < VL ? (int)(f - i) : VL);
        return transformed_row(&o->transform, row, y, out, f);
    }
    return quantise_row(seen, y, weight != NULL, o->eps, out, f);
}

INLINE float glu_any(const glu_norm_quant_op_t *o, const float *gate, const int activation, double *y, int8_t *out) {
    return o->weight ? glu_row(o, gate, o->weight, activation, y, out) : glu_row(o, gate, NULL, activation, y, out);
}

static void glu_norm_quant(run_t *run, const op_t *op, int thread) {
    const glu_norm_quant_op_t *o = &op->glu_norm_quant;
    double *y = (double *)(run->scratch + (size_t)thread * run->scratch_bytes);
    const int64_t f = o->out.columns / o->parts;
    for (int64_t item; (item = pool_take(run->pool, thread, (int64_t)run->step.tokens * o->parts)) >= 0;) {
        const int64_t m = item / o->parts, part = item % o->parts;
        const float *gate = (const float *)o->gate_up.data + m * o->gate_up.stride + part * 2 * f;
        int8_t *out = (int8_t *)o->out.data + m * o->out.stride + part * f;
        float *scale = (float *)o->scale.data + m * o->scale.stride + part;
        switch (o->activation) {
            case ACTIVATION_RELU2: *scale = glu_any(o, gate, ACTIVATION_RELU2, y, out); break;
            case ACTIVATION_SILU: *scale = glu_any(o, gate, ACTIVATION_SILU, y, out); break;
            default: *scale = glu_any(o, gate, ACTIVATION_GELU, y, out);
        }
    }
}
