/*
 * Ternary products of many tokens by look-up.
 *
 * A packed byte encodes a few weights, so there are only as many possible sums of their columns' activations as byte
 * values: 243 for five columns, 81 for four. These are computed once for LOOK_TOKENS tokens at a time; a row then has
 * the products of a byte by a load and an addition, and neither decodes weights nor multiplies. Every row uses the sums
 * of a group of columns before those of the next group replace them, so each row's accumulators stay in memory
 * meanwhile. Sums of columns that share a scale are multiplied by it, and then added as floats.
 *
 * As this needs no multiplier, and dot products few loads, the two can run side by side: gemm_lookup_dot.h. A level that
 * looks up defines LOOK_DOT_BLOCKS: the number of blocks of BLOCK_TOKENS that go by dot product beside, or 0.
 */
#ifndef BN_GEMM_LOOKUP_H
#define BN_GEMM_LOOKUP_H

#include "gemm.h"
#if defined(LOOK_DOT_BLOCKS)
#include "look_up.h"
#if LOOK_DOT_BLOCKS
#include "gemm_lookup_dot.h"
#endif
#endif

#if defined(LOOK_DOT_BLOCKS)

#if !LOOK_DOT_BLOCKS

typedef struct {
    char none;
} beside_t;

/* A group of columns by look-up, for all rows of an item. */
INLINE void look_up_rows(const look_item_t *item, const uint8_t *w, look_scratch_t *own, beside_t *beside) {
    (void)beside;
    look_t *sum = own->narrow;
    for (int64_t panel = 0; panel < item->panels; panel++, w += item->panel_bytes)
        for (int64_t row = 0; row < PANEL_ROWS; row += LOOK_STEP, sum += LOOK_STEP) {
            __builtin_prefetch(w + PANEL_ROWS * 4 + 4 * row, 0, 2);
            for (int r = 0; r < LOOK_STEP; r++) sum[r] = look_up(own->table, w + 4 * (row + r), sum[r]);
        }
}

#endif

/* The byte of the weights that a number's base-3 digits stand for, lowest first. */
typedef struct {
    uint8_t byte[LOOK_SUMS];
} look_bytes_t;

INLINE look_bytes_t look_bytes(void) {
    const encoding_t made = encoding();
    look_bytes_t bytes;
    for (int number = 0; number < LOOK_SUMS; number++) {
        uint32_t packed = 0;
        for (int left = number, scale = 1; left; left /= 3, scale *= BASE) packed += (uint32_t)(left % 3 * scale);
        bytes.byte[number] = (uint8_t)encode_lane(&made, packed);
    }
    return bytes;
}

/* The sums of byte `j` of a lane; x holds the activations of the first block for this group of columns. */
INLINE void look_fill(const look_bytes_t *bytes, const int32_t *x, int64_t block, const int j, look_t *table) {
    look_t y[PLANES], least = (look_t)(0);
    for (int p = 0; p < PLANES; p++, x += BLOCK_TOKENS) {
        look_wide_t four;
        for (int b = 0; b < LOOK_TOKENS / BLOCK_TOKENS; b++)
            memcpy((int32_t *)&four + b * BLOCK_TOKENS, x + b * block, BLOCK_TOKENS * sizeof *x);
        y[p] = __builtin_convertvector(four << (24 - 8 * j) >> 24, look_t);
        least -= y[p];
    }
    const uint8_t *byte = bytes->byte;
    table[byte[0]] = least;
    for (int p = 0, known = 1; p < PLANES; p++, known *= 3)
        for (int i = 0; i < known; i++) {
            const look_t sum = table[byte[i]] + y[p];
            table[byte[known + i]] = sum;
            table[byte[2 * known + i]] = sum + y[p];
        }
}

/* Add the narrow sums to the wide ones, or store them as the first. */
INLINE void look_widen(look_scratch_t *own, int64_t rows, bool first) {
    for (int64_t r = 0; r < rows; r++) {
        const look_wide_t more = __builtin_convertvector(own->narrow[r], look_wide_t);
        own->wide[r] = first ? more : own->wide[r] + more;
        own->narrow[r] = (look_t)(0);
    }
}

/* Add the sums of columns that share a scale, number `s` of `count`, times their rows' scales. */
INLINE void look_scale(const look_item_t *item, look_scratch_t *own, int64_t s, int64_t count, const bool wide) {
    for (int64_t row = 0; row < item->panels * PANEL_ROWS; row += VL) {
        const vf scale = v_load_half(item->scales + (row / PANEL_ROWS * count + s) * PANEL_ROWS + row % PANEL_ROWS);
        for (int i = 0; i < VL; i++) {
            look_scaled_t *sum = own->scaled + row + i;
            look_wide_t all = __builtin_convertvector(own->narrow[row + i], look_wide_t);
            if (wide) all += own->wide[row + i];
            *sum = (s ? *sum : (look_scaled_t)(0)) + __builtin_convertvector(all, look_scaled_t) * scale[i];
            own->narrow[row + i] = (look_t)(0);
        }
    }
}

/* Rows of a tile from `row` on, for all tokens of the tables, to the output. */
INLINE void look_store(const look_item_t *item, const look_scratch_t *own, int64_t row) {
    for (int m = 0; m < LOOK_TOKENS; m++) {
        int32_t acc[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++) memcpy(acc + r, (const int32_t *)&own->wide[row + r] + m, sizeof *acc);
        look_finish(item, row, item->token + m, acc, 0);
    }
}

/* The same for sums with scales. */
INLINE void look_store_scaled(const look_item_t *item, const look_scratch_t *own, int64_t row) {
    const ternary_matmul_op_t *o = item->gemm->o;
    for (int m = 0; m < LOOK_TOKENS; m++) {
        float sums[TILE_ROWS];
        for (int r = 0; r < TILE_ROWS; r++) memcpy(sums + r, (const float *)&own->scaled[row + r] + m, sizeof *sums);
        const int64_t token = item->token + m;
        finish_scaled(
            sums, o->scale[token], (float *)o->out.data + token * o->out.stride + item->column + row, TILE_ROWS, o->add);
    }
}

static void look_multiply(const look_item_t *item, look_scratch_t *own) {
    const look_bytes_t bytes = look_bytes();
    const int64_t rows = item->panels * PANEL_ROWS, group = item->gemm->o->group;
    const int64_t together = group ? groups_of(group) : item->groups; /* groups with the same scales */
    memset(own->narrow, 0, (size_t)rows * sizeof *own->narrow);
    beside_t beside = {0};
    for (int64_t g = 0; g < item->groups; g++) {
        const int32_t *x = item->x + g * PLANES * BLOCK_TOKENS;
        for (int j = 0; j < 4; j++) look_fill(&bytes, x, item->block, j, own->table[j]);
        look_up_rows(item, item->w + g * PANEL_ROWS * 4, own, &beside);
        const int64_t done = g % together + 1;
        if (group && done == together)
            look_scale(item, own, g / together, item->groups / together, together > LOOK_GROUPS);
        else if (done == together || done % LOOK_GROUPS == 0)
            look_widen(own, rows, done <= LOOK_GROUPS);
    }
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
        if (group)
            look_store_scaled(item, own, row);
        else
            look_store(item, own, row);
}

/* Spans of tokens that are multiplied by look-up; the tokens after them are not. */
INLINE int64_t look_spans(const run_t *run, const ternary_matmul_op_t *o, int64_t tokens) {
    if (o->binary || (LOOK_DOT_BLOCKS && (o->group || !run->multipliers_are_few))) return 0;
    return tokens / LOOK_SPAN;
}

/* Panels of a part that are multiplied by look-up, an even number; the panels after them are not. */
INLINE int64_t look_panels(const ternary_part_t *part) {
    const int64_t panels = part->rows / (2 * PANEL_ROWS) * 2;
    return panels * PANEL_ROWS < MIN_LOOK_ROWS ? 0 : panels;
}

/* Items that a part's panels are divided into, so that all threads have work where there are few spans. */
INLINE int64_t look_chunks(const run_t *run, const ternary_part_t *part, int64_t spans) {
    const int64_t panels = look_panels(part), fewest = (panels / 2 + LOOK_PAIRS - 1) / LOOK_PAIRS;
    const int64_t most = panels * PANEL_ROWS / MIN_LOOK_ROWS, wanted = (2 * pool_threads(run->pool) + spans - 1) / spans;
    return wanted < fewest ? fewest : wanted < most ? wanted : most;
}

INLINE int64_t look_items(const run_t *run, const ternary_matmul_op_t *o, int64_t spans) {
    int64_t items = 0;
    for (int i = 0; i < o->part_count && spans; i++) items += look_chunks(run, o->parts + i, spans) * spans;
    return items;
}

INLINE size_t look_need(const run_t *run, const ternary_matmul_op_t *o) {
    return look_items(run, o, look_spans(run, o, run->program.limits.max_tokens)) ? sizeof(look_scratch_t) : 0;
}

static void look_item(const run_t *run, const gemm_t *gemm, int64_t spans, int64_t number, int thread) {
    const ternary_matmul_op_t *o = gemm->o;
    const ternary_part_t *part = o->parts;
    int64_t column = 0, chunks;
    for (; number >= (chunks = look_chunks(run, part, spans)) * spans; part++) {
        number -= chunks * spans;
        column += part->rows;
    }
    const int64_t pairs = look_panels(part) / 2, chunk = number / spans, token = number % spans * LOOK_SPAN;
    const int64_t begin = pairs * chunk / chunks * 2, end = pairs * (chunk + 1) / chunks * 2;
    const int64_t groups = row_groups(o);
    const look_item_t item = {
        .gemm = gemm,
        .part = part,
        .w = panel_at(part->codes, begin, groups),
        .scales = o->group ? part->scales + begin * (o->x.columns / o->group) * PANEL_ROWS : NULL,
        .x = gemm->x + token * groups * PLANES,
        .groups = groups,
        .panels = end - begin,
        .panel_bytes = groups * PANEL_ROWS * 4,
        .block = BLOCK_TOKENS * groups * PLANES,
        .token = token,
        .column = column + begin * PANEL_ROWS,
    };
    look_multiply(&item, (look_scratch_t *)(run->scratch + (size_t)thread * run->scratch_bytes));
}

#else

INLINE size_t look_need(const run_t *run, const ternary_matmul_op_t *o) { return (void)run, (void)o, 0; }
INLINE int64_t look_spans(const run_t *run, const ternary_matmul_op_t *o, int64_t tokens) {
    return (void)run, (void)o, (void)tokens, 0;
}
INLINE int64_t look_panels(const ternary_part_t *part) { return (void)part, 0; }
INLINE int64_t look_items(const run_t *run, const ternary_matmul_op_t *o, int64_t spans) {
    return (void)run, (void)o, (void)spans, 0;
}
INLINE void look_item(const run_t *run, const gemm_t *gemm, int64_t spans, int64_t number, int thread) {
    (void)run, (void)gemm, (void)spans, (void)number, (void)thread;
}
#define LOOK_SPAN 0

#endif

#endif
