/*
 * A panel of weights in one bit, laid out as tile_layout.h says: Σ bit · x, from which Σ ±x = 2 Σ bit · x - Σ x. For levels
 * that define ONE_BIT, with `bit_tiles` for one token; several take the same planes as other codes (plane_tiles).
 */
#ifndef BN_BINARY_TILES_H
#define BN_BINARY_TILES_H

#include "tile_layout.h"

#ifdef ONE_BIT

/* As gemm_panel_of. */
INLINE void bit_panel_of(
    const uint8_t *w, int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    const int64_t pitch = tiles * TILE_BYTES;
    const int wide = tokens * MAX_TILES <= BLOCK_TOKENS * GEMM_TILES ? MAX_TILES : GEMM_TILES;
    int t = 0;
    for (; t + wide <= tiles; t += wide)
        plane_tiles(w + t * TILE_BYTES, pitch, wide, groups, x, tokens, acc + t * TILE_ROWS, PANEL_ROWS, 1);
    for (; t < tiles; t++) plane_tiles(w + t * TILE_BYTES, pitch, 1, groups, x, tokens, acc + t * TILE_ROWS, PANEL_ROWS, 1);
}

/* acc[row] = Σ bit · x over a panel, for one token. */
static void bit_panel_of_one(const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    switch (tiles) {
#define CASE(t) \
    case t: bit_tiles(w, t, groups, x, acc); break;
        CASE(1) CASE(2) CASE(3)
#if PANEL_TILES > 3
        CASE(4)
#endif
#undef CASE
    }
}

/* acc[token · PANEL_ROWS + row] = Σ bit · x over a panel. */
static void bit_panel(const uint8_t *w, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc) {
    switch (tokens) {
    case 1: bit_panel_of_one(w, tiles, groups, (const int8_t *)x, acc); break;
#define CASE(m) \
    case m: bit_panel_of(w, tiles, groups, x, m, acc); break;
        CASE(2) CASE(3) CASE(4)
#if BLOCK_TOKENS > 4
        CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
}

#else

INLINE void bit_panel(const uint8_t *w, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc) {
    (void)w, (void)tiles, (void)groups, (void)x, (void)tokens, (void)acc;
}

#endif

#endif
