/* causal_conv: each column convolved with a few numbers, then SiLU; the last rows before a step are a state. */
#include "rows.h"

#define CONV_COLUMNS 256 /* of an item of work */

/* The columns of one item in row `i` of a sequence: a row of x, or, before the first, one of the old state; NULL: zeros. */
INLINE const float *conv_row(const float *x, int64_t stride, const float *before, int64_t channels, int taps, int64_t i) {
    return i >= 0 ? x + i * stride : before ? before + (taps - 1 + i) * channels : NULL;
}

/* The columns `c … end - 1` of sequence `s`. */
static void conv_columns(const run_t *run, const causal_conv_op_t *o, int32_t s, int64_t c, int64_t end) {
    const step_t *step = &run->step;
    const int64_t channels = o->x.columns, begin = step->seq_begin[s], tokens = step->seq_begin[s + 1] - begin;
    const float *x = (const float *)o->x.data + begin * o->x.stride + c;
    float *out = (float *)o->out.data + begin * o->out.stride;
    const float *before = step->state_from[s] < 0 ? NULL : o->state.data + step->state_from[s] * o->state.entry + c;
    float *after = o->state.data + step->state_to[s] * o->state.entry + c;
    for (int64_t m = 0; m < tokens; m++) {
        const float *rows[64];
        for (int j = 0; j < o->taps; j++)
            rows[j] = conv_row(x, o->x.stride, before, channels, o->taps, m - o->taps + 1 + j);
        for (int64_t i = 0; i < end - c; i += VL) {
            const int n = end - c - i < VL ? (int)(end - c - i) : VL;
            vf sum = v_set(0.0f);
            for (int j = 0; j < o->taps; j++)
                if (rows[j]) sum = v_fma(v_load_part(o->weight + j * channels + c + i, n), v_load_part(rows[j] + i, n), sum);
            v_store_part(out + m * o->out.stride + c + i, sum * v_sigmoid(sum), n);
        }
    }
    /* A row moves to one before it, so the state may be its own source. */
    for (int64_t r = 0; r < o->taps - 1; r++) {
        const float *row = conv_row(x, o->x.stride, before, channels, o->taps, tokens - o->taps + 1 + r);
        if (row)
            memmove(after + r * channels, row, (size_t)(end - c) * sizeof *after);
        else
            memset(after + r * channels, 0, (size_t)(end - c) * sizeof *after);
    }
}

static void causal_conv(run_t *run, const op_t *op, int thread) {
    const causal_conv_op_t *o = &op->causal_conv;
    const int64_t chunks = (o->x.columns + CONV_COLUMNS - 1) / CONV_COLUMNS;
    for (int64_t item; (item = pool_take(run->pool, thread, run->step.seqs * chunks)) >= 0;) {
        const int64_t c = item % chunks * CONV_COLUMNS;
        const int64_t end = c + CONV_COLUMNS < o->x.columns ? c + CONV_COLUMNS : o->x.columns;
        conv_columns(run, o, (int32_t)(item / chunks), c, end);
    }
}
