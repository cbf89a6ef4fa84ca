/*
 * Shared by the products of many tokens (gemm_dot.h, gemm_amx.h, gemm_lookup.h): an operation's state, its items of work,
 * and the storing of results.
 */
#ifndef BN_GEMM_H
#define BN_GEMM_H

#include "gemm_amx.h"
#include "gemm_dot.h"

/* Where a thread packs the panel that it multiplies, of a matrix that is not packed yet. */
typedef struct {
    uint8_t *panel;
    encoding_t made;
} packer_t;

/* What an operation's items share: the activations side by side, where they are, and their sums. */
typedef struct {
    const ternary_matmul_op_t *o;
    int32_t *x, *totals; /* totals: of a token, or of each of its groups of columns that share scales */
    bool matrix; /* by matrix_pass, which takes the activations as they lie */
    packer_t packer;
    matrix_registers_t registers;
} gemm_t;

/* Groups of GROUP_COLUMNS in a row of packed weights, or of activations side by side. Columns that share a scale are padded
 * to whole groups. */
INLINE int64_t row_groups(const ternary_matmul_op_t *o) {
    return o->group ? o->x.columns / o->group * groups_of(o->group) : groups_of(o->x.columns);
}

/* Whether a matrix of a product is not packed yet. */
INLINE bool any_unpacked(const ternary_matmul_op_t *o) {
    for (int i = 0; i < o->part_count; i++)
        if (o->parts[i].unpacked) return true;
    return false;
}

INLINE size_t packer_need(const ternary_matmul_op_t *o) {
    return any_unpacked(o) ? (size_t)(PANEL_TILES * groups_of(o->x.columns) * TILE_BYTES) : 0;
}

INLINE packer_t packer_of(const run_t *run, const ternary_matmul_op_t *o, int thread) {
    packer_t packer = {.panel = run->scratch + (size_t)thread * run->scratch_bytes};
    if (any_unpacked(o)) packer.made = encoding();
    return packer;
}

/* A panel's codes, packed into the thread's scratch if the matrix is not packed yet. */
INLINE const uint8_t *panel_codes(
    const ternary_matmul_op_t *o, const ternary_part_t *part, int64_t panel, const packer_t *packer) {
    if (!part->unpacked) return panel_at(part->codes, panel, groups_of(o->x.columns));
    const pack_t job = {.codes = part->unpacked, .rows = part->rows, .columns = o->x.columns};
    pack_panel(&job, &packer->made, panel, packer->panel);
    return packer->panel;
}

/* Where an item of work lies: its part, the part's first column of the output, and the item's number in the part. */
typedef struct {
    const ternary_part_t *part;
    int64_t column, number;
} place_t;

/* Items of all parts, `spans` for each panel. */
INLINE int64_t items_in(const ternary_matmul_op_t *o, int64_t spans) {
    int64_t items = 0;
    for (int i = 0; i < o->part_count; i++) items += panels_of(o->parts[i].rows) * spans;
    return items;
}

INLINE place_t place_of(const ternary_matmul_op_t *o, int64_t spans, int64_t item) {
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

/* n <= VL results to out. */
INLINE void put(vf a, float *out, int n, int add) {
    if (add) a = v_load_part(out, n) + a;
    v_store_part(out, a, n);
}

/* Rows of acc to out, for one token: codes are weight + 1, so what `total` more there is is taken off. */
INLINE void finish(const int32_t *acc, int32_t total, float scale, float *out, int64_t rows, int add) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        put(__builtin_convertvector(*(const vi_mem *)(acc + i) - total, vf) * scale, out + i, n, add);
    }
}

/* The same for sums that have their groups' scales already. */
INLINE void finish_scaled(const float *sums, float scale, float *out, int64_t rows, int add) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        put(v_load_part(sums + i, n) * scale, out + i, n, add);
    }
}

#endif
