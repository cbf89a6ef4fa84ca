/* delta_gates: logarithms of decays, and strengths, of the delta rule, by small float products of normalised rows. */
#include "rows.h"

#define GATE_HEADS 8 /* rows of alpha and of beta in an item of work */

static need_t delta_gates_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.scratch = aligned_bytes((size_t)op->delta_gates.x.columns + VL, sizeof(float))};
}

/* Four sums side by side, so that no addition waits for the one before. */
INLINE float gate_dot(const float *a, const float *b, int64_t k) {
    vf sum[4] = {v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f)};
    int64_t i = 0;
    for (; i + 4 * VL <= k; i += 4 * VL)
        for (int j = 0; j < 4; j++) sum[j] = v_fma(v_load(a + i + j * VL), v_load(b + i + j * VL), sum[j]);
    for (; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        sum[0] = v_fma(v_load_part(a + i, n), v_load_part(b + i, n), sum[0]);
    }
    return v_sum(sum[0] + sum[1] + (sum[2] + sum[3]));
}

INLINE float softplus(float z) {
    return (z > 0.0f ? z : 0.0f) + v_log(1.0f + v_exp(v_set(z > 0.0f ? -z : z)))[0];
}

static void delta_gates(run_t *run, const op_t *op, int thread) {
    const delta_gates_op_t *o = &op->delta_gates;
    const int64_t k = o->x.columns, chunks = (o->heads + GATE_HEADS - 1) / GATE_HEADS;
    float *y = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    int64_t normed = -1; /* the token whose row is in y */
    for (int64_t item; (item = pool_take(run->pool, thread, run->step.tokens * chunks)) >= 0;) {
        const int64_t m = item / chunks, first = item % chunks * GATE_HEADS;
        const float *x = (const float *)o->x.data + m * o->x.stride;
        float *out = (float *)o->out.data + m * o->out.stride;
        if (normed != m) norm_floats(x, o->weight, o->eps, y, k);
        normed = m;
        for (int64_t h = first; h < o->heads && h < first + GATE_HEADS; h++) {
            out[h] = o->rate[h] * softplus(gate_dot(y, o->alpha + h * k, k) + o->bias[h]);
            out[o->heads + h] = v_sigmoid(v_set(gate_dot(y, o->beta + h * k, k)))[0];
        }
    }
}
