/* Before the sources of the AMX level: its registers in memory and its instructions in C, as Intel's manual (SDM, volume
 * 2, TILELOADD and TDPBSUD) has them. Shapes that the processor would refuse end the program. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape;
    _Alignas(64) int8_t data[8][16][64];
} tiles_;

#define __AMX_INT8__ 1
#undef _tile_loadconfig
#define _tile_loadconfig tile_loadconfig_
#undef _tile_release
#define _tile_release tile_release_
#undef _tile_zero
#define _tile_zero tile_zero_
#undef _tile_loadd
#define _tile_loadd tile_loadd_
#undef _tile_stored
#define _tile_stored tile_stored_
#undef _tile_dpbsud
#define _tile_dpbsud tile_dpbsud_

static inline void tile_loadconfig_(const void *from) {
    memset(&tiles_, 0, sizeof tiles_);
    memcpy(&tiles_.shape, from, sizeof tiles_.shape);
    if (tiles_.shape.palette != 1) abort();
    for (int i = 0; i < 16; i++)
        if (tiles_.shape.rows[i] > 16 || tiles_.shape.row_bytes[i] > 64 || !tiles_.shape.rows[i] != !tiles_.shape.row_bytes[i])
            abort();
}

static inline void tile_release_(void) { memset(&tiles_, 0, sizeof tiles_); }

static inline int rows_(int tile) {
    if (tiles_.shape.palette == 0 || tiles_.shape.rows[tile] == 0) abort();
    return tiles_.shape.rows[tile];
}

static inline void tile_zero_(int tile) { memset(tiles_.data[tile], 0, (size_t)rows_(tile) * 64); }

static inline void tile_loadd_(int tile, const void *from, int64_t stride) {
    memset(tiles_.data[tile], 0, sizeof tiles_.data[tile]);
    for (int r = 0; r < rows_(tile); r++)
        memcpy(tiles_.data[tile][r], (const int8_t *)from + r * stride, tiles_.shape.row_bytes[tile]);
}

static inline void tile_stored_(int tile, void *to, int64_t stride) {
    for (int r = 0; r < rows_(tile); r++)
        memcpy((int8_t *)to + r * stride, tiles_.data[tile][r], tiles_.shape.row_bytes[tile]);
}

static inline void tile_dpbsud_(int sums, int a, int b) {
    const int columns = tiles_.shape.row_bytes[sums] / 4, depth = tiles_.shape.row_bytes[a] / 4;
    if (rows_(sums) != rows_(a) || rows_(b) != depth || tiles_.shape.row_bytes[b] != 4 * columns) abort();
    for (int m = 0; m < rows_(sums); m++)
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++) {
                int32_t sum;
                memcpy(&sum, &tiles_.data[sums][m][4 * n], 4);
                for (int i = 0; i < 4; i++)
                    sum += tiles_.data[a][m][4 * k + i] * (int)(uint8_t)tiles_.data[b][k][4 * n + i];
                memcpy(&tiles_.data[sums][m][4 * n], &sum, 4);
            }
}
