/*
 * Shared by the products by look-up: a thread's tables and sums, the work items, and how a row's sums are looked up and
 * stored. For levels that define LOOK_DOT_BLOCKS (gemm_lookup.h).
 */
#ifndef BN_LOOK_UP_H
#define BN_LOOK_UP_H

#include "gemm.h"

#define LOOK_TOKENS 32
#define LOOK_SPAN (LOOK_TOKENS + LOOK_DOT_BLOCKS * BLOCK_TOKENS) /* tokens of an item */
#define LOOK_PAIRS (2592 / (2 * PANEL_ROWS)) /* of panels, of an item: more sums do not fit into the second-level cache, */
#define MAX_LOOK_ROWS (LOOK_PAIRS * 2 * PANEL_ROWS) /* rows; */
#define MIN_LOOK_ROWS 576 /* and for fewer it is not worth while to fill the tables */
#define LOOK_STEP 8 /* rows */
#define LOOK_SUMS (PLANES == 5 ? 243 : 81)
#define LOOK_TABLE (256 + 13) /* with 13 lines between them, the tables' 81 lines share no set of the cache with too many */
#define LOOK_GROUPS 12 /* of columns, whose sums of 48 bytes, at most 48 · 5 · 128, fit into 16 bits */

typedef int16_t look_t __attribute__((ext_vector_type(LOOK_TOKENS)));
typedef int32_t look_wide_t __attribute__((ext_vector_type(LOOK_TOKENS), aligned(64)));
typedef float look_scaled_t __attribute__((ext_vector_type(LOOK_TOKENS), aligned(64)));

/* A thread's scratch. */
typedef struct {
    look_t table[4][LOOK_TABLE]; /* of each byte of a lane, by the byte: Σ weights · activations of its columns */
    look_t narrow[MAX_LOOK_ROWS]; /* by row: sums of up to LOOK_GROUPS groups of columns, */
    look_wide_t wide[MAX_LOOK_ROWS]; /* of those before that have the same scale, */
    look_scaled_t scaled[MAX_LOOK_ROWS]; /* and of those before with other scales, multiplied by them */
} look_scratch_t;

/* Whole panels of a part, MAX_LOOK_ROWS rows at most, by LOOK_SPAN tokens. */
typedef struct {
    const gemm_t *gemm;
    const ternary_part_t *part;
    const uint8_t *w;
    const half_t *scales; /* of the first panel, or NULL */
    const int32_t *x; /* activations as `interleave` puts them */
    int64_t groups, panels, panel_bytes, block; /* from one block's activations to the next one's */
    int64_t token, column; /* the first, of the output */
} look_item_t;

/* Rows of a tile, from `row` of the item on, to the output. */
INLINE void look_finish(const look_item_t *item, int64_t row, int64_t token, const int32_t *acc, int32_t total) {
    const ternary_matmul_op_t *o = item->gemm->o;
    float *out = (float *)o->out.data + token * o->out.stride + item->column + row;
    finish(acc, total, o->scale[token] * item->part->scale, out, TILE_ROWS, o->add);
}

INLINE look_t look_up(const look_t (*table)[LOOK_TABLE], const uint8_t *w, look_t sum) {
    uint32_t bytes;
    memcpy(&bytes, w, sizeof bytes);
    sum += table[0][bytes & 0xff];
    sum += table[1][bytes >> 8 & 0xff];
    sum += table[2][bytes >> 16 & 0xff];
    return sum + table[3][bytes >> 24];
}

#endif
