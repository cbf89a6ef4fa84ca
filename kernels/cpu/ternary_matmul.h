/*
 * ternary_matmul: out[M, ΣN] = x · Wᵀ · (scale · w), exact in int32.
 *
 * One token streams the weights (gemv_tiles). More tokens share each weight read: they are taken in blocks of up to
 * BLOCK_TOKENS, whose activations are first put side by side, and a panel stays in the cache for all of them. Threads take
 * panels, each from a stretch of its own.
 */
#include "tile_layout.h"

/* Tokens of an item of work: enough to pay for fetching a panel, few enough that there is work for every thread. */
#define ITEM_TOKENS (16 * BLOCK_TOKENS)

INLINE int64_t padded_columns(int64_t k) { return groups_of(k) * GROUP_COLUMNS; }

static need_t ternary_matmul_need(const run_t *run, const op_t *op) {
    const size_t m = (size_t)run->program.limits.max_tokens;
    const size_t packed = aligned_bytes(m, (size_t)padded_columns(op->ternary_matmul.x.columns));
    return (need_t){.shared = packed + aligned_bytes(m, sizeof(int32_t))};
}

INLINE int32_t sum_of_codes(const int8_t *x, int64_t k) {
    int32_t sum = 0;
    for (int64_t i = 0; i < k; i++) sum += x[i];
    return sum;
}

/* Rows of acc to out, for one token: codes are weight + 1, so what `total` more there is is taken off. */
INLINE void finish(const int32_t *acc, int32_t total, float scale, float *out, int64_t rows, int add) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        vf a = __builtin_convertvector(*(const vi_mem *)(acc + i) - total, vf) * scale;
        if (add) a = v_load_part(out + i, n) + a;
        v_store_part(out + i, a, n);
    }
}

static void gemv_panel(const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    switch (tiles) {
#define CASE(t) \
    case t: gemv_tiles(w, t, groups, x, acc); break;
        CASE(1) CASE(2) CASE(3)
#if PANEL_TILES > 3
        CASE(4)
#endif
#undef CASE
    }
}

#if BASE == 4
INLINE void gemm_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    plane_tiles(w, pitch, tiles, groups, x, tokens, acc, PANEL_ROWS, 2);
}
#endif

/* As many tiles at a time as the level has registers for; `tokens` is a constant. */
INLINE void gemm_panel_of(
    const uint8_t *w, int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    const int64_t pitch = tiles * TILE_BYTES;
    int t = 0;
    for (; t + GEMM_TILES <= tiles; t += GEMM_TILES)
        gemm_tiles(w + t * TILE_BYTES, pitch, GEMM_TILES, groups, x, tokens, acc + t * TILE_ROWS);
    for (; t < tiles; t++) gemm_tiles(w + t * TILE_BYTES, pitch, 1, groups, x, tokens, acc + t * TILE_ROWS);
}

static void gemm_panel(const uint8_t *w, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc) {
    switch (tokens) {
#define CASE(m) \
    case m: gemm_panel_of(w, tiles, groups, x, m, acc); break;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if BLOCK_TOKENS > 4
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
}

/* Activations of a block of tokens side by side: four columns of each token, then the next four, … */
static void interleave(const matrix_t *x, int64_t first, int tokens, int64_t k, int32_t *to, int32_t *totals) {
    const int64_t fours = padded_columns(k) / 4;
    for (int m = 0; m < tokens; m++) {
        const int8_t *from = (const int8_t *)x->data + (first + m) * x->stride;
        for (int64_t i = 0; i < k / 4; i++) memcpy(to + i * tokens + m, from + 4 * i, 4);
        for (int64_t i = k / 4; i < fours; i++) to[i * tokens + m] = 0;
        totals[m] = sum_of_codes(from, k);
    }
}

/* Where an item of work lies: its part, the part's first column of the output, and the item's number in the part. */
typedef struct {
    const ternary_part_t *part;
    int64_t column, number;
} place_t;

/* Items of all parts, `spans` for each panel. */
static int64_t items_in(const ternary_matmul_op_t *o, int64_t spans) {
    int64_t items = 0;
    for (int i = 0; i < o->part_count; i++) items += panels_of(o->parts[i].rows) * spans;
    return items;
}

static place_t place_of(const ternary_matmul_op_t *o, int64_t spans, int64_t item) {
    place_t place = {o->parts, 0, item};
    for (; place.number >= panels_of(place.part->rows) * spans; place.part++) {
        place.number -= panels_of(place.part->rows) * spans;
        place.column += place.part->rows;
    }
    return place;
}

INLINE int64_t panel_rows(const ternary_part_t *part, int64_t panel) {
    const int64_t left = part->rows - panel * PANEL_ROWS;
    return left < PANEL_ROWS ? left : PANEL_ROWS;
}

static void ternary_gemv(run_t *run, const ternary_matmul_op_t *o, int thread) {
    const int8_t *x = o->x.data;
    const int64_t k = o->x.columns, groups = groups_of(k), items = items_in(o, 1);
    const int32_t total = sum_of_codes(x, k);
    for (int64_t item; (item = pool_take(run->pool, thread, items)) >= 0;) {
        const place_t at = place_of(o, 1, item);
        int32_t acc[PANEL_ROWS];
        const uint8_t *w = panel_at(at.part->codes, at.number, groups);
        gemv_panel(w, panel_tiles(at.part->rows, at.number), groups, x, acc);
        float *out = (float *)o->out.data + at.column + at.number * PANEL_ROWS;
        finish(acc, total, *o->scale * at.part->scale, out, panel_rows(at.part, at.number), o->add);
    }
}

/* One panel by the tokens `begin` to `end`, blocks of BLOCK_TOKENS at a time. */
static void gemm_item(
    const ternary_matmul_op_t *o, place_t at, int64_t panel, int64_t begin, int64_t end, const int32_t *x,
    const int32_t *totals) {
    const int64_t groups = groups_of(o->x.columns);
    const uint8_t *w = panel_at(at.part->codes, panel, groups);
    int32_t acc[BLOCK_TOKENS * PANEL_ROWS];
    for (int64_t first = begin; first < end; first += BLOCK_TOKENS) {
        const int tokens = end - first < BLOCK_TOKENS ? (int)(end - first) : BLOCK_TOKENS;
        gemm_panel(w, panel_tiles(at.part->rows, panel), groups, x + first * groups * PLANES, tokens, acc);
        for (int m = 0; m < tokens; m++) {
            const float scale = o->scale[first + m] * at.part->scale;
            float *out = (float *)o->out.data + (first + m) * o->out.stride + at.column + panel * PANEL_ROWS;
            finish(acc + m * PANEL_ROWS, totals[first + m], scale, out, panel_rows(at.part, panel), o->add);
        }
    }
}

static void ternary_gemm(run_t *run, const ternary_matmul_op_t *o, int thread) {
    const int64_t k = o->x.columns, groups = groups_of(k), tokens = run->step.tokens;
    const int64_t blocks = (tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    int32_t *x = (int32_t *)run->shared;
    int32_t *totals = (int32_t *)(run->shared + aligned_bytes((size_t)tokens, (size_t)padded_columns(k)));
    for (int64_t b; (b = pool_take(run->pool, thread, blocks)) >= 0;) {
        const int64_t first = b * BLOCK_TOKENS;
        const int block = tokens - first < BLOCK_TOKENS ? (int)(tokens - first) : BLOCK_TOKENS;
        interleave(&o->x, first, block, k, x + first * groups * PLANES, totals + first);
    }
    pool_barrier(run->pool, thread);
    const int64_t spans = (tokens + ITEM_TOKENS - 1) / ITEM_TOKENS, items = items_in(o, spans);
    for (int64_t item; (item = pool_take(run->pool, thread, items)) >= 0;) {
        const place_t at = place_of(o, spans, item);
        const int64_t begin = at.number % spans * ITEM_TOKENS;
        const int64_t end = begin + ITEM_TOKENS < tokens ? begin + ITEM_TOKENS : tokens;
        gemm_item(o, at, at.number / spans, begin, end, x, totals);
    }
}

static stretch_t ternary_matmul_begins(const run_t *run, const op_t *op, int thread) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    const int64_t groups = groups_of(o->x.columns), items = items_in(o, 1), first = pool_share(run->pool, thread, items);
    if (first >= items) return (stretch_t){0};
    const place_t at = place_of(o, 1, first);
    const uint8_t *begin = panel_at(at.part->codes, at.number, groups);
    return (stretch_t){begin, at.part->codes + packed_bytes(at.part->rows, o->x.columns)};
}

static void ternary_matmul(run_t *run, const op_t *op, int thread) {
    if (run->step.tokens == 1)
        ternary_gemv(run, &op->ternary_matmul, thread);
    else
        ternary_gemm(run, &op->ternary_matmul, thread);
}
