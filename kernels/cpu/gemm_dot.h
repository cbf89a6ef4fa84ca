/*
 * Ternary products of a few tokens, each step a dot product of four columns (`vpdpbusd`, `sdot`): up to BLOCK_TOKENS
 * tokens at a time, whose activations are first interleaved.
 */
#ifndef BN_GEMM_DOT_H
#define BN_GEMM_DOT_H

#include "tile_layout.h"

INLINE int64_t padded_columns(int64_t k) { return groups_of(k) * GROUP_COLUMNS; }

/* Activations of a block of tokens side by side: four columns of each token, then the next four, … */
static void interleave(const matrix_t *x, int64_t first, int tokens, int32_t *to) {
    const int64_t k = x->columns, fours = padded_columns(k) / 4;
    for (int m = 0; m < tokens; m++) {
        const int8_t *from = (const int8_t *)x->data + (first + m) * x->stride;
        for (int64_t i = 0; i < k / 4; i++) memcpy(to + i * tokens + m, from + 4 * i, 4);
        for (int64_t i = k / 4; i < fours; i++) to[i * tokens + m] = 0;
    }
}

#if BASE == 4
INLINE void gemm_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    plane_tiles(w, pitch, tiles, groups, x, tokens, acc, PANEL_ROWS, 2);
}
#endif

#define WIDE_TILES (PANEL_TILES < MAX_TILES ? PANEL_TILES : MAX_TILES)

/* As many tiles at a time as the level has registers for; with few tokens, those of a whole panel, so that
 * memory is read front to back. `tokens` is a constant. */
INLINE void gemm_panel_of(
    const uint8_t *w, int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    const int64_t pitch = tiles * TILE_BYTES;
    const int wide = tokens * WIDE_TILES <= BLOCK_TOKENS * GEMM_TILES ? WIDE_TILES : GEMM_TILES;
    int t = 0;
    for (; t + wide <= tiles; t += wide)
        gemm_tiles(w + t * TILE_BYTES, pitch, wide, groups, x, tokens, acc + t * TILE_ROWS);
    for (; t < tiles; t++) gemm_tiles(w + t * TILE_BYTES, pitch, 1, groups, x, tokens, acc + t * TILE_ROWS);
}

/* acc[token · PANEL_ROWS + row] = Σ codes · x over a panel. */
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

/* acc[row] = Σ codes · x over a panel, for one token. */
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

#endif
