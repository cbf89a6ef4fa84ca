/*
 * delta_rule: the gated delta rule, token by token.
 *
 * A column of a head's matrix depends on no other column. So an item of work is a block of columns of one head, small
 * enough for the first-level cache, through which all tokens of a sequence pass: memory is read and written once a step, and
 * the bits of a result do not depend on how a prompt is cut. Chunks by products of matrices would take more operations here.
 *
 * A state has its columns in blocks: [v_heads][blocks][d_k][width].
 */
#include "rows.h"

#define DELTA_COLUMNS 64 /* of a block, at most */
#define DELTA_VECTORS (DELTA_COLUMNS / VL)
#define DELTA_TOKENS 16 /* whose q and k are normalised together */

static need_t delta_rule_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.scratch = aligned_bytes(2 * DELTA_TOKENS * ((size_t)op->delta_rule.d_k + VL), sizeof(float))};
}

/* to = a head of q or k, divided by its L2 norm and multiplied by `unit`. */
INLINE void unit_head(const float *from, float *to, int d, float eps, double unit) {
    const double factor = unit / sqrt(sum_of_squares(from, d) + (double)eps);
    for (int i = 0; i < d; i += VL) {
        const int n = d - i < VL ? d - i : VL;
        v_store_part(to + i, __builtin_convertvector(v_wide(v_load_part(from + i, n)) * factor, vf), n);
    }
}

/* One token by one block of `vectors` vectors, a constant: `from`, which may be `to` or NULL for zeros, becomes `to`. */
INLINE void delta_token(
    const float *q, const float *k, const float *v, float decay, float strength, const float *from, float *to, float *out,
    int d_k, int columns, const int vectors) {
    vf found[DELTA_VECTORS], result[DELTA_VECTORS];
    const int64_t width = (int64_t)vectors * VL;
    for (int j = 0; j < vectors; j++) found[j] = result[j] = v_set(0.0f);
    for (int i = 0; from && i < d_k; i++)
        for (int j = 0; j < vectors; j++) found[j] = v_fma(v_set(k[i]), v_load(from + i * width + j * VL), found[j]);
    for (int j = 0; j < vectors; j++) {
        const int rest = columns - j * VL, n = rest < 0 ? 0 : rest < VL ? rest : VL;
        found[j] = strength * (v_load_part(v + j * VL, n) - decay * found[j]);
    }
    for (int i = 0; i < d_k; i++)
        for (int j = 0; j < vectors; j++) {
            const vf old = from ? v_load(from + i * width + j * VL) : v_set(0.0f);
            const vf s = v_fma(v_set(k[i]), found[j], decay * old);
            v_store(to + i * width + j * VL, s);
            result[j] = v_fma(v_set(q[i]), s, result[j]);
        }
    for (int j = 0; j < vectors; j++) {
        const int rest = columns - j * VL;
        if (rest > 0) v_store_part(out + j * VL, result[j], rest < VL ? rest : VL);
    }
}

/* All tokens of sequence `s` by block `b` of head `h`. */
static void delta_block(const run_t *run, const delta_rule_op_t *o, int32_t s, int h, int b, float *scratch) {
    const step_t *step = &run->step;
    const int blocks = (o->d_v + DELTA_COLUMNS - 1) / DELTA_COLUMNS;
    const int width = blocks > 1 ? DELTA_COLUMNS : (o->d_v + 15) / 16 * 16; /* as lowering.py lays it out */
    const int columns = o->d_v - b * DELTA_COLUMNS < width ? o->d_v - b * DELTA_COLUMNS : width;
    const int g = o->tiled ? h % o->k_heads : h / (o->v_heads / o->k_heads), pitch = o->d_k + VL;
    const int64_t own = ((int64_t)h * blocks + b) * o->d_k * width;
    const float *from = step->state_from[s] < 0 ? NULL : o->state.data + step->state_from[s] * o->state.entry + own;
    float *to = o->state.data + step->state_to[s] * o->state.entry + own;
    const int64_t end = step->seq_begin[s + 1];
    float *queries = scratch, *keys = scratch + DELTA_TOKENS * pitch;
    for (int64_t first = step->seq_begin[s]; first < end; first += DELTA_TOKENS) {
        const int64_t last = end - first < DELTA_TOKENS ? end : first + DELTA_TOKENS;
        for (int64_t m = first; m < last; m++) {
            const float *row = (const float *)o->qkv.data + m * o->qkv.stride + (int64_t)g * o->d_k;
            unit_head(row, queries + (m - first) * pitch, o->d_k, o->eps, 1.0 / sqrt((double)o->d_k));
            unit_head(row + (int64_t)o->k_heads * o->d_k, keys + (m - first) * pitch, o->d_k, o->eps, 1.0);
        }
        for (int64_t m = first; m < last; m++, from = to) {
            const float *q = queries + (m - first) * pitch, *k = keys + (m - first) * pitch;
            const int64_t column = (int64_t)h * o->d_v + b * DELTA_COLUMNS;
            const float *v = (const float *)o->qkv.data + m * o->qkv.stride + 2 * (int64_t)o->k_heads * o->d_k + column;
            const float *gates = (const float *)o->gates.data + m * o->gates.stride;
            float *out = (float *)o->out.data + m * o->out.stride + column;
            const float decay = v_exp(v_set(gates[h]))[0], strength = gates[o->v_heads + h];
            switch (width) {
#define WIDTH(n)                                                                                                          \
    case n: delta_token(q, k, v, decay, strength, from, to, out, o->d_k, columns, n / VL); break
                WIDTH(16);
                WIDTH(32);
                WIDTH(48);
                WIDTH(64);
#undef WIDTH
            }
        }
    }
}

static void delta_rule(run_t *run, const op_t *op, int thread) {
    const delta_rule_op_t *o = &op->delta_rule;
    const int blocks = (o->d_v + DELTA_COLUMNS - 1) / DELTA_COLUMNS, each = o->v_heads * blocks;
    float *scratch = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    for (int64_t item; (item = pool_take(run->pool, thread, (int64_t)run->step.seqs * each)) >= 0;) {
        const int of = (int)(item % each);
        delta_block(run, o, (int32_t)(item / each), of / blocks, of % blocks, scratch);
    }
}
