/*
 * ternary_matmul: out[M, ΣN] = x · Wᵀ · (scale · w), exact in int32.
 *
 * One token streams the weights (gemv_tiles). More tokens share each weight read: they are taken in passes of up to
 * PASS_TOKENS, and a panel stays in the cache for all of them. Threads take panels, each from a stretch of its own.
 * For many tokens, some levels take some or all by look-up instead (gemm_lookup.h), in items that come before the panels.
 * A matrix that is not packed yet is packed a panel at a time, just before it is multiplied.
 */
#include "gemm_items.h"

static need_t ternary_matmul_need(const run_t *run, const op_t *op) {
    const size_t m = (size_t)run->program.limits.max_tokens;
    const size_t side_by_side = aligned_bytes(m, (size_t)padded_columns(op->ternary_matmul.x.columns));
    const size_t shared = side_by_side + aligned_bytes(m, sizeof(int32_t));
    const size_t look = look_need(run, &op->ternary_matmul), panel = packer_need(&op->ternary_matmul);
    return (need_t){.shared = shared, .scratch = look < panel ? panel : look};
}

INLINE int32_t sum_of_codes(const int8_t *x, int64_t k) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; i++) sum += x[i];
    return sum;
}

static void ternary_gemv(run_t *run, const ternary_matmul_op_t *o, int thread) {
    const int8_t *x = o->x.data;
    const int64_t k = o->x.columns, groups = groups_of(k), items = items_in(o, 1);
    const int32_t total = sum_of_codes(x, k);
    const packer_t packer = packer_of(run, o, thread);
    for (int64_t item; (item = pool_take(run->pool, thread, items)) >= 0;) {
        const place_t at = place_of(o, 1, item);
        int32_t acc[PANEL_ROWS];
        const uint8_t *w = panel_codes(o, at.part, at.number, &packer);
        gemv_panel(w, panel_tiles(at.part->rows, at.number), groups, x, acc);
        float *out = (float *)o->out.data + at.column + at.number * PANEL_ROWS;
        finish(acc, total, *o->scale * at.part->scale, out, panel_rows(at.part, at.number), o->add);
    }
}

/* acc = a panel by at most `left` tokens from `first` on; returns how many. */
INLINE int gemm_pass(gemm_t *gemm, const uint8_t *w, int tiles, int64_t first, int left, int32_t *acc) {
    const matrix_t *x = &gemm->o->x;
    if (gemm->matrix) return matrix_pass(&gemm->registers, w, tiles, x, first, left, acc);
    const int tokens = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
    gemm_panel(w, tiles, groups_of(x->columns), gemm->x + first * padded_columns(x->columns) / 4, tokens, acc);
    return tokens;
}

/* One panel by the tokens `begin` to `end`. */
INLINE void gemm_item(gemm_t *gemm, place_t at, int64_t panel, int64_t begin, int64_t end) {
    const ternary_matmul_op_t *o = gemm->o;
    const uint8_t *w = panel_codes(o, at.part, panel, &gemm->packer);
    int32_t acc[PASS_TOKENS * PANEL_ROWS];
    for (int64_t first = begin; first < end;) {
        const int tokens = gemm_pass(gemm, w, panel_tiles(at.part->rows, panel), first, (int)(end - first), acc);
        for (int m = 0; m < tokens; m++, first++) {
            const float scale = o->scale[first] * at.part->scale;
            float *out = (float *)o->out.data + first * o->out.stride + at.column + panel * PANEL_ROWS;
            finish(acc + m * PANEL_ROWS, gemm->totals[first], scale, out, panel_rows(at.part, panel), o->add);
        }
    }
}

static void ternary_gemm(run_t *run, const ternary_matmul_op_t *o, int thread) {
    const int64_t k = o->x.columns, tokens = run->step.tokens, blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    gemm_t gemm = {.o = o, .x = (int32_t *)run->shared, .matrix = matrix_takes(tokens)};
    gemm.packer = packer_of(run, o, thread);
    gemm.totals = (int32_t *)(run->shared + aligned_bytes((size_t)tokens, (size_t)padded_columns(k)));
    for (int64_t b; (b = pool_take(run->pool, thread, blocks)) >= 0;) {
        const int64_t first = b * BLOCK_TOKENS;
        const int block = tokens - first < BLOCK_TOKENS ? (int)(tokens - first) : BLOCK_TOKENS;
        if (!gemm.matrix) interleave(&o->x, first, block, gemm.x + first * padded_columns(k) / 4);
        for (int64_t m = first; m < first + block; m++)
            gemm.totals[m] = sum_of_codes((const int8_t *)o->x.data + m * o->x.stride, k);
    }
    pool_barrier(run->pool, thread);
    multiply_items(run, &gemm, thread, gemm_item);
    matrix_end(&gemm.registers);
}

static stretch_t ternary_matmul_begins(const run_t *run, const op_t *op, int thread) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    const int64_t groups = groups_of(o->x.columns), items = items_in(o, 1), first = pool_share(run->pool, thread, items);
    if (first >= items) return (stretch_t){0};
    const place_t at = place_of(o, 1, first);
    if (at.part->unpacked) return (stretch_t){0};
    const uint8_t *begin = panel_at(at.part->codes, at.number, groups);
    return (stretch_t){begin, at.part->codes + packed_bytes(at.part->rows, o->x.columns, 0, false)};
}

static void ternary_matmul(run_t *run, const op_t *op, int thread) {
    if (run->step.tokens == 1)
        ternary_gemv(run, &op->ternary_matmul, thread);
    else
        ternary_gemm(run, &op->ternary_matmul, thread);
}
