/*
 * The layout of ternary weights, and repacking a matrix into it.
 *
 * A tile is TILE_ROWS rows by GROUP_COLUMNS columns in 4 TILE_ROWS bytes: 32-bit lane r holds row r, its byte j the columns
 * j, 4 + j, 8 + j, … as the digits of a number, lowest first: four of BASE 4, or five of BASE 3 (a level may encode the numbers). So what takes one digit
 * out of every byte leaves four neighbouring columns of every row in place for a 4-way dot product with four activations
 * broadcast to all lanes, and no sum runs across lanes. PANEL_TILES tiles stand one after the other for the first
 * columns, then for the next, …: a pass over a panel reads memory once, from front to back. Digits are 0, 1, 2 for -1, 0,
 * +1: the sum of the activations is subtracted once. Those past the last column are 0, so that what stands in memory
 * behind a row of activations does not count.
 */
#ifndef BN_TILE_LAYOUT_H
#define BN_TILE_LAYOUT_H

#define TILE_BYTES (4 * TILE_ROWS)
#define PLANES (GROUP_COLUMNS / 4)
#define PANEL_ROWS (TILE_ROWS * PANEL_TILES)

INLINE int64_t groups_of(int64_t columns) { return (columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS; }
INLINE int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
INLINE int64_t panels_of(int64_t rows) { return (rows + PANEL_ROWS - 1) / PANEL_ROWS; }
INLINE int panel_tiles(int64_t rows, int64_t panel) {
    int64_t left = tiles_of(rows) - panel * PANEL_TILES;
    return left < PANEL_TILES ? (int)left : PANEL_TILES;
}
INLINE const uint8_t *panel_at(const uint8_t *packed, int64_t panel, int64_t groups) {
    return packed + panel * PANEL_TILES * groups * TILE_BYTES;
}

static size_t packed_bytes(int64_t rows, int64_t columns) {
    return (size_t)(tiles_of(rows) * groups_of(columns) * TILE_BYTES);
}

/* Four columns of a packed row, one a byte. Byte i of 32 holds the columns i, i + 32, i + 64, i + 96 of 128, the first in
 * its top bits. */
INLINE uint32_t four_codes(const uint8_t *row, int64_t column) {
    uint32_t word;
    memcpy(&word, row + column / 128 * 32 + column % 32, sizeof word);
    return word >> (6 - 2 * (column % 128 / 32)) & 0x03030303u;
}

#if BASE == 4
typedef struct {
    char none;
} encoding_t;
INLINE encoding_t encoding(void) { return (encoding_t){0}; }
INLINE uint32_t encode_lane(const encoding_t *made, uint32_t numbers) {
    (void)made;
    return numbers;
}
#endif

/* A row's lane of the tile that begins at a column: four numbers side by side, by Horner's rule; none exceeds its byte. */
INLINE uint32_t pack_lane(const uint8_t *row, int64_t first, int64_t columns) {
    uint32_t lane = 0;
    for (int64_t column = first + GROUP_COLUMNS - 4; column >= first; column -= 4)
        lane = lane * BASE + (column < columns ? four_codes(row, column) : 0);
    return lane;
}

static void pack(pool_t *pool, const pack_t *job, int thread) {
    const encoding_t made = encoding();
    const int64_t groups = groups_of(job->columns), row_bytes = (job->columns + 127) / 128 * 32;
    for (int64_t panel; (panel = pool_take(pool, thread, panels_of(job->rows))) >= 0;) {
        const int tiles = panel_tiles(job->rows, panel);
        uint8_t *to = job->packed + panel * PANEL_TILES * groups * TILE_BYTES;
        for (int t = 0; t < tiles; t++)
            for (int r = 0; r < TILE_ROWS; r++) {
                const int64_t row = panel * PANEL_ROWS + t * TILE_ROWS + r;
                const uint8_t *from = job->codes + row * row_bytes;
                for (int64_t g = 0; g < groups; g++) {
                    const uint32_t numbers = row < job->rows ? pack_lane(from, g * GROUP_COLUMNS, job->columns) : 0;
                    const uint32_t lane = encode_lane(&made, numbers);
                    memcpy(to + (g * tiles + t) * TILE_BYTES + 4 * r, &lane, sizeof lane);
                }
            }
    }
}

#endif
