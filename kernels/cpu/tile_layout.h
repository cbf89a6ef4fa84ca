/*
 * The layout of ternary weights, and repacking a matrix into it.
 *
 * A tile is TILE_ROWS rows by GROUP_COLUMNS columns in 4 TILE_ROWS bytes: 32-bit lane r holds row r, its byte j the columns
 * j, 4 + j, 8 + j, … as the digits of a number, lowest first: four of BASE 4, or five of BASE 3 (a level may encode the numbers). So taking one digit
 * out of every byte leaves four neighbouring columns of every row in place for a 4-way dot product with four activations
 * broadcast to all lanes, and no sum runs across lanes. PANEL_TILES tiles stand one after the other for the first
 * columns, then for the next, …: a pass over a panel reads memory once, from front to back. Digits are 0, 1, 2 for -1, 0,
 * +1: the sum of the activations is subtracted once. Digits past the last column are 0, so that memory
 * after a row of activations does not count.
 */
#ifndef BN_TILE_LAYOUT_H
#define BN_TILE_LAYOUT_H

#define TILE_BYTES (4 * TILE_ROWS)
#define PLANES (GROUP_COLUMNS / 4)
#define PANEL_ROWS (TILE_ROWS * PANEL_TILES)
/* Tokens of an item of work: enough to pay for fetching a panel, few enough that there is work for every thread. */
#define ITEM_TOKENS (16 * BLOCK_TOKENS)

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

/* Columns that are taken out of a row at a time: whole blocks of 128 and whole groups. */
#define STRIP_COLUMNS 640
_Static_assert(STRIP_COLUMNS % 128 == 0 && STRIP_COLUMNS % GROUP_COLUMNS == 0, "a strip is whole blocks and whole groups");

/* The codes of a row from a column on, one a byte; 0 past the last. Byte i of 32 holds the columns i, i + 32, i + 64, i + 96
 * of 128, the first in its top bits. */
INLINE void unpack_strip(const uint8_t *row, int64_t first, int64_t columns, uint8_t *codes) {
    const int64_t count = columns - first < STRIP_COLUMNS ? columns - first : STRIP_COLUMNS;
    const uint8_t *from = row + first / 4;
    for (int64_t at = 0; at < count; at += 128, from += 32)
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 32; i++) codes[at + 32 * part + i] = from[i] >> (6 - 2 * part) & 3;
    memset(codes + count, 0, (size_t)(STRIP_COLUMNS - count));
}

/* A lane of a tile, of GROUP_COLUMNS codes: four numbers side by side, by Horner's rule; none exceeds its byte. */
INLINE uint32_t pack_lane(const uint8_t *codes) {
    uint32_t lane = 0;
    for (int p = PLANES - 1; p >= 0; p--) {
        uint32_t four;
        memcpy(&four, codes + 4 * p, sizeof four);
        lane = lane * BASE + four;
    }
    return lane;
}

static void pack(pool_t *pool, const pack_t *job, int thread) {
    const encoding_t made = encoding();
    const int64_t groups = groups_of(job->columns), row_bytes = (job->columns + 127) / 128 * 32;
    for (int64_t panel; (panel = pool_take(pool, thread, panels_of(job->rows))) >= 0;) {
        const int tiles = panel_tiles(job->rows, panel);
        uint8_t *to = job->packed + panel * PANEL_TILES * groups * TILE_BYTES;
        for (int64_t first = 0; first < job->columns; first += STRIP_COLUMNS)
            for (int lane = 0; lane < tiles * TILE_ROWS; lane++) {
                const int64_t row = panel * PANEL_ROWS + lane;
                uint8_t codes[STRIP_COLUMNS] = {0};
                if (row < job->rows) unpack_strip(job->codes + row * row_bytes, first, job->columns, codes);
                for (int64_t at = 0; at < STRIP_COLUMNS && first + at < job->columns; at += GROUP_COLUMNS) {
                    const uint32_t word = encode_lane(&made, pack_lane(codes + at));
                    memcpy(to + (first + at) / GROUP_COLUMNS * tiles * TILE_BYTES + 4 * lane, &word, sizeof word);
                }
            }
    }
}

#endif
