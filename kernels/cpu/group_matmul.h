/*
 * ternary_matmul of weights with a scale for each group of columns: out[M, ΣN] = scale · Σ_s (x_s · W_sᵀ) · w_s.
 *
 * A group is packed on its own, so that the micro-kernels of ternary_matmul.h multiply it exactly in int32: padding
 * columns at its end have digits 0, so the activations there do not matter. Products of groups are added one after the
 * other, as kernels/README.md states: the result has the same bits on every level and every device.
 */
#include "gemm_dot.h"

INLINE int64_t span_columns(int64_t group) { return groups_of(group) * GROUP_COLUMNS; }

/* Bytes of a block of tokens' sums in a panel. */
INLINE size_t sums_bytes(void) { return aligned_bytes(BLOCK_TOKENS * PANEL_ROWS, sizeof(float)); }

static need_t group_matmul_need(const run_t *run, const op_t *op) {
    const group_matmul_op_t *o = &op->group_matmul;
    const size_t m = (size_t)run->program.limits.max_tokens, count = (size_t)(o->x.columns / o->group);
    const size_t side_by_side = aligned_bytes(m * count, (size_t)span_columns(o->group));
    return (need_t){.shared = side_by_side + aligned_bytes(m * count, sizeof(int32_t)), .scratch = sums_bytes()};
}

/* A part, its first column of the output, and the number of a panel in it. */
typedef struct {
    const group_part_t *part;
    int64_t column, panel;
} group_place_t;

static int64_t group_panels(const group_matmul_op_t *o) {
    int64_t panels = 0;
    for (int i = 0; i < o->part_count; i++) panels += panels_of(o->parts[i].rows);
    return panels;
}

static group_place_t group_place(const group_matmul_op_t *o, int64_t panel) {
    group_place_t place = {o->parts, 0, panel};
    for (; place.panel >= panels_of(place.part->rows); place.part++) {
        place.panel -= panels_of(place.part->rows);
        place.column += place.part->rows;
    }
    return place;
}

/* Activations of a block of tokens side by side, group by group, and the sum of each token's in each group. */
static void group_interleave(const group_matmul_op_t *o, int64_t first, int tokens, int32_t *to, int32_t *totals) {
    const int64_t group = o->group, count = o->x.columns / group, fours = span_columns(group) / 4;
    for (int m = 0; m < tokens; m++) {
        const int8_t *from = (const int8_t *)o->x.data + (first + m) * o->x.stride;
        for (int64_t s = 0; s < count; s++, from += group) {
            int32_t *span = to + s * fours * tokens + m, sum = 0;
            for (int64_t i = 0; i < fours; i++) {
                span[i * tokens] = 0;
                if (i < group / 4) memcpy(span + i * tokens, from + 4 * i, 4);
            }
            for (int64_t i = 0; i < group; i++) sum += from[i];
            totals[m * count + s] = sum;
        }
    }
}

/* sums[token · PANEL_ROWS + row] += (acc - total) · w, of one group. */
INLINE void group_add(const int32_t *acc, int32_t total, const half_t *w, int64_t rows, float *sums) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        const vf product = __builtin_convertvector(*(const vi_mem *)(acc + i) - total, vf) * v_load_half_part(w + i, n);
        v_store_part(sums + i, v_load_part(sums + i, n) + product, n);
    }
}

/* A panel by a block of tokens. */
static void group_block(
    const group_matmul_op_t *o, group_place_t at, const int32_t *x, const int32_t *totals, int64_t first, int tokens,
    float *sums) {
    const int64_t group = o->group, count = o->x.columns / group, groups = groups_of(group);
    const int64_t left = at.part->rows - at.panel * PANEL_ROWS, rows = left < PANEL_ROWS ? left : PANEL_ROWS;
    const int tiles = panel_tiles(at.part->rows, at.panel);
    const uint8_t *w = panel_at(at.part->codes, at.panel, count * groups);
    const half_t *scales = at.part->scales + at.panel * count * PANEL_ROWS;
    memset(sums, 0, (size_t)tokens * PANEL_ROWS * sizeof *sums);
    for (int64_t s = 0; s < count; s++, w += tiles * groups * TILE_BYTES, scales += PANEL_ROWS) {
        int32_t acc[BLOCK_TOKENS * PANEL_ROWS];
        const int32_t *own = x + s * span_columns(group) / 4 * tokens;
        if (tokens == 1)
            gemv_panel(w, tiles, groups, (const int8_t *)own, acc);
        else
            gemm_panel(w, tiles, groups, own, tokens, acc);
        for (int m = 0; m < tokens; m++)
            group_add(acc + m * PANEL_ROWS, totals[m * count + s], scales, rows, sums + m * PANEL_ROWS);
    }
    for (int m = 0; m < tokens; m++) {
        float *out = (float *)o->out.data + (first + m) * o->out.stride + at.column + at.panel * PANEL_ROWS;
        for (int64_t i = 0; i < rows; i += VL) {
            const int n = rows - i < VL ? (int)(rows - i) : VL;
            vf a = v_load_part(sums + m * PANEL_ROWS + i, n) * o->scale[first + m];
            if (o->add) a = v_load_part(out + i, n) + a;
            v_store_part(out + i, a, n);
        }
    }
}

static void group_matmul(run_t *run, const op_t *op, int thread) {
    const group_matmul_op_t *o = &op->group_matmul;
    const int64_t tokens = run->step.tokens, blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    const int64_t count = o->x.columns / o->group, row = count * span_columns(o->group) / 4;
    int32_t *x = (int32_t *)run->shared;
    int32_t *totals = (int32_t *)(run->shared + aligned_bytes((size_t)(tokens * row), sizeof *x));
    for (int64_t b; (b = pool_take(run->pool, thread, blocks)) >= 0;) {
        const int64_t first = b * BLOCK_TOKENS;
        const int block = tokens - first < BLOCK_TOKENS ? (int)(tokens - first) : BLOCK_TOKENS;
        group_interleave(o, first, block, x + first * row, totals + first * count);
    }
    pool_barrier(run->pool, thread);
    float *sums = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    const int64_t spans = (tokens + ITEM_TOKENS - 1) / ITEM_TOKENS, items = group_panels(o) * spans;
    for (int64_t item; (item = pool_take(run->pool, thread, items)) >= 0;) {
        const group_place_t at = group_place(o, item / spans);
        const int64_t begin = item % spans * ITEM_TOKENS, end = begin + ITEM_TOKENS < tokens ? begin + ITEM_TOKENS : tokens;
        for (int64_t first = begin; first < end; first += BLOCK_TOKENS) {
            const int block = end - first < BLOCK_TOKENS ? (int)(end - first) : BLOCK_TOKENS;
            group_block(o, at, x + first * row, totals + first * count, first, block, sums);
        }
    }
}
