/* quantize: absmean ternary quantisation of a float matrix. */
#include "rows.h"

/* Rows whose magnitudes are summed together, so that the order of the sums depends on the matrix only, not on the threads. */
#define QUANTIZE_ROWS 16

static int64_t quantize_chunks(const quantize_op_t *o) { return (o->rows + QUANTIZE_ROWS - 1) / QUANTIZE_ROWS; }

static need_t quantize_need(const run_t *run, const op_t *op) {
    (void)run;
    return (need_t){.shared = aligned_bytes((size_t)quantize_chunks(&op->quantize), sizeof(double))};
}

static void quantize(run_t *run, const op_t *op, int thread) {
    const quantize_op_t *o = &op->quantize;
    const int64_t columns = o->x.columns, chunks = quantize_chunks(o);
    double *sums = (double *)run->shared;
    for (int64_t c; (c = pool_take(run->pool, thread, chunks)) >= 0;) {
        vd sum = (vd)(0.0);
        for (int64_t n = c * QUANTIZE_ROWS; n < o->rows && n < (c + 1) * QUANTIZE_ROWS; n++) {
            const float *x = (const float *)o->x.data + n * o->x.stride;
            for (int64_t i = 0; i < columns; i += VL) {
                int rest = columns - i < VL ? (int)(columns - i) : VL;
                sum += __builtin_convertvector(v_abs(v_load_part(x + i, rest)), vd);
            }
        }
        sums[c] = v_sum_double(sum);
    }
    pool_barrier(run->pool, thread);
    double total = 0;
    for (int64_t c = 0; c < chunks; c++) total += sums[c];
    const double mean = total / ((double)o->rows * (double)columns);
    const float scale = (float)(mean > 1e-5 ? mean : 1e-5);
    if (thread == 0) *o->scale = scale;
    for (int64_t c; (c = pool_take(run->pool, thread, chunks)) >= 0;)
        for (int64_t n = c * QUANTIZE_ROWS; n < o->rows && n < (c + 1) * QUANTIZE_ROWS; n++) {
            const float *x = (const float *)o->x.data + n * o->x.stride;
            int8_t *codes = (int8_t *)o->codes.data + n * o->codes.stride;
            for (int64_t i = 0; i < columns; i += VL) {
                int rest = columns - i < VL ? (int)(columns - i) : VL;
                vf a = v_max(v_min(v_load_part(x + i, rest) / scale, v_set(1.0f)), v_set(-1.0f));
                vb code = __builtin_convertvector(__builtin_convertvector(v_round(a), vi), vb);
                memcpy(codes + i, &code, (size_t)rest);
            }
        }
}
