/*
 * expert_matmul: products of rows with the matrices of their experts, exact in int32 as those of ternary_matmul.h.
 *
 * A row is a token's for one of its experts. Every thread sorts the rows by expert. An item of work is some panels of an
 * expert by all of its rows: weights of an expert are read from memory once, however many rows it has, and those of experts
 * without rows never. Where results are summed over a token's experts, they are kept apart until all are there: for many
 * rows, some panels of all experts at a time.
 */
#include "group_matmul.h"

#define EXPERT_ROWS (8 * BLOCK_TOKENS) /* rows that are side by side in a thread's scratch */
#define EXPERT_SUMS ((int64_t)1 << 20) /* results that are kept apart, at most, where a panel of each row is not more */
#define EXPERT_ITEMS 8 /* of each thread, at least, where there are that many panels */

/* Where the rows of an expert begin in `order`, and the rows: a token times the number of its experts, plus which one. */
typedef struct {
    int32_t *begin, *order, *busy; /* [experts + 1], [rows], [experts]: those that have rows */
    int32_t busy_count;
} sorted_t;

INLINE int64_t expert_columns(const expert_matmul_op_t *o) {
    return o->shares.data ? o->x.columns / o->ids.columns : o->x.columns;
}

INLINE int64_t expert_panels(const expert_matmul_op_t *o) {
    int64_t panels = 0;
    for (int i = 0; i < o->part_count; i++) panels += panels_of(o->parts[i].rows);
    return panels;
}

/* Panels of all rows whose results are kept apart at a time. */
INLINE int64_t panels_apart(const expert_matmul_op_t *o, int64_t rows) {
    const int64_t panels = expert_panels(o), fit = EXPERT_SUMS / (rows * PANEL_ROWS);
    return !o->shares.data || fit >= panels ? panels : fit > 0 ? fit : 1;
}

INLINE size_t sides_bytes(const expert_matmul_op_t *o) {
    const int64_t k = expert_columns(o), span = o->group ? o->group : k;
    return aligned_bytes((size_t)(EXPERT_ROWS * (k / span) * span_columns(span)), 1);
}

INLINE size_t totals_bytes(const expert_matmul_op_t *o) {
    const int64_t k = expert_columns(o), span = o->group ? o->group : k;
    return aligned_bytes((size_t)(EXPERT_ROWS * (k / span)), sizeof(int32_t));
}

static need_t expert_matmul_need(const run_t *run, const op_t *op) {
    const expert_matmul_op_t *o = &op->expert_matmul;
    const int64_t rows = (int64_t)run->program.limits.max_tokens * o->ids.columns;
    const int64_t apart = rows * PANEL_ROWS > EXPERT_SUMS ? rows * PANEL_ROWS : EXPERT_SUMS;
    const int64_t all = rows * PANEL_ROWS * expert_panels(o);
    return (need_t){
        .shared = o->shares.data ? aligned_bytes((size_t)(all < apart ? all : apart), sizeof(float)) : 0,
        .scratch = sides_bytes(o) + totals_bytes(o) + aligned_bytes((size_t)(2 * o->experts + 1 + rows), sizeof(int32_t)),
    };
}

static void sort_rows(const expert_matmul_op_t *o, int64_t tokens, sorted_t *sorted) {
    const int32_t top = o->ids.columns;
    memset(sorted->begin, 0, (size_t)(o->experts + 1) * sizeof *sorted->begin);
    for (int64_t m = 0; m < tokens; m++)
        for (int32_t j = 0; j < top; j++) sorted->begin[((const int32_t *)o->ids.data)[m * o->ids.stride + j] + 1]++;
    sorted->busy_count = 0;
    for (int32_t e = 0; e < o->experts; e++) {
        if (sorted->begin[e + 1]) sorted->busy[sorted->busy_count++] = e;
        sorted->begin[e + 1] += sorted->begin[e];
    }
    /* Each expert's begin moves to its end, which is where the next one begins: they are put back afterwards. */
    for (int64_t m = 0; m < tokens; m++)
        for (int32_t j = 0; j < top; j++)
            sorted->order[sorted->begin[((const int32_t *)o->ids.data)[m * o->ids.stride + j]]++] = (int32_t)(m * top + j);
    for (int32_t e = o->experts; e > 0; e--) sorted->begin[e] = sorted->begin[e - 1];
    sorted->begin[0] = 0;
}

/* Rows of an expert side by side, in blocks of BLOCK_TOKENS, and the sums of their codes. */
static void gather_rows(const expert_matmul_op_t *o, const int32_t *rows, int count, int32_t *x, int32_t *totals) {
    const int64_t k = expert_columns(o), span = o->group ? o->group : k, groups = k / span;
    const int64_t lane = groups * span_columns(span) / 4;
    for (int i = 0; i < count; i++) {
        const int first = i / BLOCK_TOKENS * BLOCK_TOKENS, block = count - first < BLOCK_TOKENS ? count - first : BLOCK_TOKENS;
        const int64_t m = rows[i] / o->ids.columns, part = o->shares.data ? rows[i] % o->ids.columns : 0;
        const int8_t *from = (const int8_t *)o->x.data + m * o->x.stride + part * k;
        interleave_row(from, k, span, span_columns(span) / 4, block, x + first * lane + (i - first), totals + i * groups);
    }
}

/* The products of a block of rows with a panel of an expert, stored at to[row]. */
INLINE void expert_block(
    const expert_matmul_op_t *o, const ternary_part_t *part, int64_t expert, int64_t panel, const int32_t *x,
    const int32_t *totals, const float *scales, int count, float *const *to) {
    const int64_t k = expert_columns(o), span = o->group ? o->group : k, each = k / span, groups = groups_of(span);
    const int64_t rows = panel_rows(part, panel);
    const int tiles = panel_tiles(part->rows, panel);
    const uint8_t *codes = part->codes + expert * (int64_t)packed_bytes(part->rows, k, o->group, false);
    const uint8_t *w = panel_at(codes, panel, each * groups);
    const half_t *units = NULL;
    if (o->group) units = part->scales + (expert * panels_of(part->rows) + panel) * each * PANEL_ROWS;
    float sums[BLOCK_TOKENS * PANEL_ROWS];
    if (units) memset(sums, 0, (size_t)count * PANEL_ROWS * sizeof *sums);
    for (int64_t s = 0; s < each; s++, w += tiles * groups * TILE_BYTES) {
        int32_t acc[BLOCK_TOKENS * PANEL_ROWS];
        const int32_t *own = x + s * groups * PLANES * count;
        if (count == 1)
            gemv_panel(w, tiles, groups, (const int8_t *)own, acc);
        else
            gemm_panel(w, tiles, groups, own, count, acc);
        for (int i = 0; i < count; i++) {
            if (units)
                group_add(acc + i * PANEL_ROWS, 1, totals[i * each + s], units + s * PANEL_ROWS, rows, sums + i * PANEL_ROWS);
            else
                finish(acc + i * PANEL_ROWS, totals[i], scales[i] * part->scale, to[i], rows, 0);
        }
    }
    for (int i = 0; units && i < count; i++) finish_scaled(sums + i * PANEL_ROWS, scales[i], to[i], rows, 0);
}

/* Where results of a pass go: the operation's output, or a row of `apart` for each row, from the panel `first` on. */
typedef struct {
    float *apart;
    int64_t first, panels;
} pass_t;

/* The panels begin … end - 1 of an expert by all of its rows. */
static void expert_item(
    const expert_matmul_op_t *o, const sorted_t *sorted, int32_t expert, const pass_t *pass, int64_t begin, int64_t end,
    int32_t *x, int32_t *totals) {
    const int64_t k = expert_columns(o), span = o->group ? o->group : k, lane = k / span * span_columns(span) / 4;
    const int32_t top = o->ids.columns;
    const ternary_matmul_op_t stacked = {.parts = o->parts, .part_count = o->part_count};
    for (int32_t at = sorted->begin[expert]; at < sorted->begin[expert + 1]; at += EXPERT_ROWS) {
        const int32_t left = sorted->begin[expert + 1] - at, count = left < EXPERT_ROWS ? left : EXPERT_ROWS;
        const int32_t *rows = sorted->order + at;
        gather_rows(o, rows, count, x, totals);
        for (int64_t panel = begin; panel < end; panel++) {
            const place_t place = place_of(&stacked, 1, panel);
            for (int32_t first = 0; first < count; first += BLOCK_TOKENS) {
                const int block = count - first < BLOCK_TOKENS ? count - first : BLOCK_TOKENS;
                float scales[BLOCK_TOKENS], *to[BLOCK_TOKENS];
                for (int i = 0; i < block; i++) {
                    const int64_t row = rows[first + i], m = row / top, j = row % top;
                    scales[i] = ((const float *)o->scale.data)[m * o->scale.stride + (pass->apart ? j : 0)];
                    to[i] = pass->apart ? pass->apart + (row * pass->panels + panel - pass->first) * PANEL_ROWS
                                        : (float *)o->out.data + m * o->out.stride + j * o->each + place.column
                                              + place.number * PANEL_ROWS;
                }
                expert_block(
                    o, place.part, expert, place.number, x + first * lane, totals + first * (k / span), scales, block, to);
            }
        }
    }
}

/* Add a token's results of a pass, times their shares, to its row of the output. */
static void add_shares(const expert_matmul_op_t *o, const pass_t *pass, int64_t m, int64_t panel) {
    const ternary_matmul_op_t stacked = {.parts = o->parts, .part_count = o->part_count};
    const place_t place = place_of(&stacked, 1, panel);
    const int32_t top = o->ids.columns;
    const float *from = pass->apart + (m * top * pass->panels + panel - pass->first) * PANEL_ROWS;
    const float *shares = (const float *)o->shares.data + m * o->shares.stride;
    float *out = (float *)o->out.data + m * o->out.stride + place.column + place.number * PANEL_ROWS;
    const int64_t rows = panel_rows(place.part, place.number);
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        vf sum = v_set(0.0f);
        for (int32_t j = 0; j < top; j++) sum = sum + v_load_part(from + j * pass->panels * PANEL_ROWS + i, n) * shares[j];
        v_store_part(out + i, v_load_part(out + i, n) + sum, n);
    }
}

static void expert_matmul(run_t *run, const op_t *op, int thread) {
    const expert_matmul_op_t *o = &op->expert_matmul;
    const int64_t tokens = run->step.tokens, panels = expert_panels(o), step = panels_apart(o, tokens * o->ids.columns);
    uint8_t *own = run->scratch + (size_t)thread * run->scratch_bytes;
    int32_t *x = (int32_t *)own, *totals = (int32_t *)(own + sides_bytes(o));
    sorted_t sorted = {.begin = (int32_t *)(own + sides_bytes(o) + totals_bytes(o))};
    sorted.busy = sorted.begin + o->experts + 1;
    sorted.order = sorted.busy + o->experts;
    sort_rows(o, tokens, &sorted);
    for (int64_t first = 0; first < panels; first += step) {
        const pass_t pass = {
            .apart = o->shares.data ? (float *)run->shared : NULL,
            .first = first,
            .panels = panels - first < step ? panels - first : step,
        };
        const int64_t wanted = ((int64_t)EXPERT_ITEMS * run->threads + sorted.busy_count - 1) / sorted.busy_count;
        const int64_t chunks = wanted < pass.panels ? wanted : pass.panels;
        for (int64_t item; (item = pool_take(run->pool, thread, sorted.busy_count * chunks)) >= 0;) {
            const int64_t chunk = item % chunks, begin = first + pass.panels * chunk / chunks;
            const int64_t end = first + pass.panels * (chunk + 1) / chunks;
            expert_item(o, &sorted, sorted.busy[item / chunks], &pass, begin, end, x, totals);
        }
        if (!pass.apart) continue;
        pool_barrier(run->pool, thread);
        for (int64_t item; (item = pool_take(run->pool, thread, tokens * pass.panels)) >= 0;)
            add_shares(o, &pass, item / pass.panels, first + item % pass.panels);
        if (first + step < panels) pool_barrier(run->pool, thread);
    }
}
