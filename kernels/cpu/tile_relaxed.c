/*
 * The micro-kernels of tile_simd128.h with relaxed instructions, for the loops' constant sizes.
 */
#include <stdint.h>

#include "vec.h"

#define gemv_tiles gemv
#define plane_tiles planes
#include "tile_simd128.h"
#undef gemv_tiles
#undef plane_tiles

void gemv_tiles(const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int32_t *acc);
void plane_tiles(
    const uint8_t *w, int64_t pitch, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc, int acc_pitch,
    int bits);

void gemv_tiles(const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    switch (tiles) {
#define TILES(t) \
    case t: gemv(w, t, groups, x, acc); break;
        TILES(1)
        TILES(2)
        TILES(3)
        TILES(4)
#undef TILES
    }
}

void plane_tiles(
    const uint8_t *w, int64_t pitch, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc, int acc_pitch,
    int bits) {
    switch (tiles << 8 | tokens << 4 | bits) {
#define SIZES(t, m, b) \
    case t << 8 | m << 4 | b: planes(w, pitch, t, groups, x, m, acc, acc_pitch, b); break;
#define TOKENS(t, b) SIZES(t, 1, b) SIZES(t, 2, b) SIZES(t, 3, b) SIZES(t, 4, b)
        TOKENS(1, 2)
        TOKENS(2, 2)
        TOKENS(1, 4)
        TOKENS(2, 4)
#undef TOKENS
#undef SIZES
    }
}
