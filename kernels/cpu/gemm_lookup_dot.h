/*
 * Dot products beside look-ups (gemm_lookup.h), for AVX-512.
 *
 * A step is LOOK_STEP rows and one group of columns by look-up for LOOK_TOKENS tokens, and meanwhile two tiles and one group by
 * dot product for a block of other tokens. Dot products go through all groups before the next block or two tiles, so that
 * their sums stay in registers; over an item both have the same number of steps.
 */
#ifndef BN_GEMM_LOOKUP_DOT_H
#define BN_GEMM_LOOKUP_DOT_H

#include "look_up.h"

_Static_assert(LOOK_STEP * LOOK_DOT_BLOCKS == 2 * TILE_ROWS, "an item has as many steps of either");

/* Where the dot products are: after `pass` passes of all groups, with `left` groups to go of the next one. */
typedef struct {
    int64_t pass, left;
    const uint8_t *w[2];
    const int32_t *x;
    __m512i sum[2][BLOCK_TOKENS];
} beside_t;

INLINE void beside_begin(const look_item_t *item, beside_t *beside) {
    const int64_t tile = beside->pass / LOOK_DOT_BLOCKS * 2;
    for (int t = 0; t < 2; t++)
        beside->w[t] = item->w + (tile + t) / PANEL_TILES * item->panel_bytes + (tile + t) % PANEL_TILES * TILE_BYTES;
    beside->x = item->x + (LOOK_TOKENS / BLOCK_TOKENS + beside->pass % LOOK_DOT_BLOCKS) * item->block;
    beside->left = item->groups;
    memset(beside->sum, 0, sizeof beside->sum);
}

INLINE void beside_end(const look_item_t *item, beside_t *beside) {
    const int64_t row = beside->pass / LOOK_DOT_BLOCKS * 2 * TILE_ROWS;
    const int64_t token = item->token + LOOK_TOKENS + beside->pass % LOOK_DOT_BLOCKS * BLOCK_TOKENS;
    for (int t = 0; t < 2; t++)
        for (int m = 0; m < BLOCK_TOKENS; m++) {
            int32_t acc[TILE_ROWS];
            _mm512_storeu_si512(acc, beside->sum[t][m]);
            look_finish(item, row + t * TILE_ROWS, token + m, acc, item->gemm->totals[token + m]);
        }
    beside->pass++;
}

/* Where the look-ups are: at a step of a panel, and the sums of its rows. */
typedef struct {
    const uint8_t *w;
    look_t *sum;
    int step;
} look_at_t;

#define PANEL_STEPS (PANEL_ROWS / LOOK_STEP)

/* Run `steps` of both. */
INLINE void look_up_and_multiply(
    const look_item_t *item, const look_t (*table)[LOOK_TABLE], int64_t steps, look_at_t *look, beside_t *beside) {
    const tables_t apart = tables();
    const int64_t pitch = PANEL_TILES * TILE_BYTES;
    const uint8_t *w = look->w, *w0 = beside->w[0], *w1 = beside->w[1];
    const int32_t *x = beside->x;
    look_t *rows = look->sum;
    int in_panel = look->step;
    __m512i sum[2][BLOCK_TOKENS];
    for (int m = 0; m < BLOCK_TOKENS; m++) sum[0][m] = beside->sum[0][m], sum[1][m] = beside->sum[1][m];
    for (int64_t i = 0; i < steps; i++) {
        const taken_t taken[2] = {take_apart(w0, apart), take_apart(w1, apart)};
        _mm_prefetch(w0 + SOON, _MM_HINT_T0);
        _mm_prefetch(w1 + SOON, _MM_HINT_T0);
        _mm_prefetch(w + pitch, _MM_HINT_T1); /* the next group's tables */
#pragma clang loop unroll(full)
        for (int p = 0; p < PLANES; p++) {
            const __m512i plane[2] = {plane_of(taken[0], p), plane_of(taken[1], p)};
#pragma clang loop unroll(full)
            for (int m = 0; m < BLOCK_TOKENS; m++) {
                const __m512i y = four_of(x + p * BLOCK_TOKENS + m);
                for (int t = 0; t < 2; t++) sum[t][m] = _mm512_dpbusd_epi32(sum[t][m], plane[t], y);
                /* 8 · PLANES pairs of products; after each PLANES of them comes one of 8 rows. */
                const int done = p * BLOCK_TOKENS + m + 1, r = done / PLANES - 1;
                if (done % PLANES == 0) rows[r] = look_up(table, w + 4 * r, rows[r]);
                /* Keeps this order: the compiler would otherwise gather all look-ups, and spill what it loads. */
                __asm__ volatile("" : "+v"(sum[0][m]), "+v"(sum[1][m]) : : "memory");
            }
        }
        w0 += pitch;
        w1 += pitch;
        x += PLANES * BLOCK_TOKENS;
        rows += LOOK_STEP;
        const bool last = ++in_panel == PANEL_STEPS;
        w += 4 * LOOK_STEP + (last ? item->panel_bytes - pitch : 0);
        if (last) in_panel = 0;
    }
    for (int m = 0; m < BLOCK_TOKENS; m++) beside->sum[0][m] = sum[0][m], beside->sum[1][m] = sum[1][m];
    beside->w[0] = w0;
    beside->w[1] = w1;
    beside->x = x;
    *look = (look_at_t){w, rows, in_panel};
}
_Static_assert(BLOCK_TOKENS == LOOK_STEP, "a row for each PLANES pairs of products");

INLINE void look_up_rows(const look_item_t *item, const uint8_t *w, look_scratch_t *own, beside_t *beside) {
    look_at_t look = {.w = w, .sum = own->narrow};
    for (int64_t todo = item->panels * PANEL_STEPS, steps; todo > 0; todo -= steps) {
        if (beside->left == 0) beside_begin(item, beside);
        steps = beside->left < todo ? beside->left : todo;
        look_up_and_multiply(item, own->table, steps, &look, beside);
        if ((beside->left -= steps) == 0) beside_end(item, beside);
    }
}

#endif
