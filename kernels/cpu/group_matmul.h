/*
 * ternary_matmul of weights with a scale for each group of columns: out[M, ΣN] = scale · Σ_s (x_s · W_sᵀ) · w_s.
 *
 * A group is packed on its own, so that the micro-kernels of ternary_matmul.h multiply it exactly in int32: padding
 * columns at its end have digits 0, so the activations there do not matter. Products of groups are added one after the
 * other, as kernels/README.md states: the result has the same bits on every level and every device.
 */
#ifndef BN_GROUP_MATMUL_H
#define BN_GROUP_MATMUL_H

#include "binary_tiles.h"
#include "gemm_items.h"

INLINE int64_t span_columns(int64_t group) { return groups_of(group) * GROUP_COLUMNS; }

static need_t group_matmul_need(const run_t *run, const op_t *op) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    const size_t m = (size_t)run->program.limits.max_tokens, count = (size_t)(o->x.columns / o->group);
    const size_t side_by_side = aligned_bytes(m, (size_t)row_groups(o) * GROUP_COLUMNS);
    return (need_t){.shared = side_by_side + aligned_bytes(m * count, sizeof(int32_t)), .scratch = look_need(run, o)};
}

/* One row of a block of `tokens` side by side, group by group in `fours` of columns, and its sum in each group. */
INLINE void interleave_row(
    const int8_t *from, int64_t k, int64_t group, int64_t fours, int tokens, int32_t *to, int32_t *totals) {
    for (int64_t s = 0; s < k / group; s++, from += group) {
        int32_t *span = to + s * fours * tokens, sum = 0;
        for (int64_t i = 0; i < fours; i++) {
            span[i * tokens] = 0;
            if (i < group / 4) memcpy(span + i * tokens, from + 4 * i, 4);
        }
        for (int64_t i = 0; i < group; i++) sum += from[i];
        totals[s] = sum;
    }
}

/* Activations of a block of tokens side by side, and the sum of each token's in each group. */
static void group_interleave(const ternary_matmul_op_t *o, int64_t first, int tokens, int32_t *to, int32_t *totals) {
    const int64_t k = o->x.columns, count = k / o->group;
    const int64_t fours = o->binary ? o->group / 4 : span_columns(o->group) / 4;
    for (int m = 0; m < tokens; m++) {
        const int8_t *from = (const int8_t *)o->x.data + (first + m) * o->x.stride;
        interleave_row(from, k, o->group, fours, tokens, to + m, totals + m * count);
    }
}

/* sums[token · PANEL_ROWS + row] += (unit · acc - total) · w, of one group; `unit` is a constant. */
INLINE void group_add(
    const int32_t *acc, const int32_t unit, int32_t total, const half_t *w, int64_t rows, float *sums) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        const vi codes = *(const vi_mem *)(acc + i) * unit - total;
        const vf product = __builtin_convertvector(codes, vf) * v_load_half_part(w + i, n);
        v_store_part(sums + i, v_load_part(sums + i, n) + product, n);
    }
}

/* A panel by a block of tokens. `binary` is a constant: whether a weight has one bit (binary_matmul.h). */
INLINE void group_block(
    const gemm_t *gemm, place_t at, int64_t panel, int64_t first, int tokens, const bool binary) {
    const ternary_matmul_op_t *o = gemm->o;
    const int64_t count = o->x.columns / o->group, rows = panel_rows(at.part, panel);
    const int64_t groups = binary ? o->group / BIT_COLUMNS : groups_of(o->group);
    const int64_t fours = groups * (binary ? BIT_PLANES : PLANES);
    const int tiles = panel_tiles(at.part->rows, panel);
    const uint8_t *w = panel_at(at.part->codes, panel, count * groups);
    const half_t *scales = at.part->scales + panel * count * PANEL_ROWS;
    const int32_t *x = gemm->x + first * count * fours, *totals = gemm->totals + first * count;
    float sums[BLOCK_TOKENS * PANEL_ROWS];
    memset(sums, 0, (size_t)tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t s = 0; s < count; s++, w += tiles * groups * TILE_BYTES, scales += PANEL_ROWS) {
        int32_t acc[BLOCK_TOKENS * PANEL_ROWS];
        const int32_t *own = x + s * fours * tokens;
        if (binary)
            bit_panel(w, tiles, groups, own, tokens, acc);
        else if (tokens == 1)
            gemv_panel(w, tiles, groups, (const int8_t *)own, acc);
        else
            gemm_panel(w, tiles, groups, own, tokens, acc);
        for (int m = 0; m < tokens; m++)
            group_add(
                acc + m * PANEL_ROWS, binary ? 2 : 1, totals[m * count + s], scales, rows, sums + m * PANEL_ROWS);
    }
    for (int m = 0; m < tokens; m++) {
        float *out = (float *)o->out.data + (first + m) * o->out.stride + at.column + panel * PANEL_ROWS;
        finish_scaled(sums + m * PANEL_ROWS, o->scale[first + m], out, rows, o->add);
    }
}

INLINE void group_item(gemm_t *gemm, place_t at, int64_t panel, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += BLOCK_TOKENS)
        group_block(gemm, at, panel, first, end - first < BLOCK_TOKENS ? (int)(end - first) : BLOCK_TOKENS, false);
}

/* Put the activations side by side, and take the items; `row` is a row's activations in fours. */
INLINE void group_product(run_t *run, const ternary_matmul_op_t *o, int64_t row, int thread, multiply_item_t *multiply) {
    const int64_t tokens = run->step.tokens, blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int64_t count = o->x.columns / o->group;
    gemm_t gemm = {.o = o, .x = (int32_t *)run->shared};
    gemm.totals = (int32_t *)(run->shared + aligned_bytes((size_t)(tokens * row), sizeof *gemm.x));
    for (int64_t b; (b = pool_take(run->pool, thread, blocks)) >= 0;) {
        const int64_t first = b * BLOCK_TOKENS;
        const int block = tokens - first < BLOCK_TOKENS ? (int)(tokens - first) : BLOCK_TOKENS;
        group_interleave(o, first, block, gemm.x + first * row, gemm.totals + first * count);
    }
    pool_barrier(run->pool, thread);
    multiply_items(run, &gemm, thread, multiply);
}

static void group_matmul(run_t *run, const op_t *op, int thread) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    group_product(run, o, row_groups(o) * PLANES, thread, group_item);
}

#endif
