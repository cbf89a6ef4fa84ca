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

/* Bytes of a packed matrix. Columns are packed `group` at a time, or all together where it is 0. */
static size_t packed_bytes(int64_t rows, int64_t columns, int64_t group) {
    const int64_t groups = group ? columns / group * groups_of(group) : groups_of(columns);
    return (size_t)(tiles_of(rows) * groups * TILE_BYTES);
}

/* Bytes of its scales, [panels][columns / group][PANEL_ROWS]. */
static size_t packed_scales(int64_t rows, int64_t columns, int64_t group) {
    return (size_t)(panels_of(rows) * PANEL_ROWS * (columns / group)) * sizeof(uint16_t);
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
/* The p-th four neighbouring codes of a lane, one a byte. */
INLINE uint32_t plane_codes(uint32_t lane, int p) { return lane >> 2 * p & 0x03030303; }
#endif

/* Columns that are taken out of a row at a time: whole quarters of a block of 128, and whole groups. */
#define STRIP_COLUMNS 640
_Static_assert(STRIP_COLUMNS % 32 == 0 && STRIP_COLUMNS % GROUP_COLUMNS == 0, "a strip is whole quarters and whole groups");

/* The codes of `count` columns of a row, one a byte; 0 past the last. `first` is a multiple of 32. Byte i of 32 holds the
 * columns i, i + 32, i + 64, i + 96 of 128, the first in its top bits. */
INLINE void unpack_strip(const uint8_t *row, int64_t first, int64_t count, uint8_t *codes) {
    for (int64_t at = 0; at < count; at += 32) {
        const uint8_t *from = row + (first + at) / 128 * 32;
        const int shift = 6 - 2 * (int)((first + at) / 32 % 4);
        for (int i = 0; i < 32; i++) codes[at + i] = from[i] >> shift & 3;
    }
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

/* A strip of a row, of `left` columns at most, into its lane of tiles that stand `tiles` apart. */
INLINE void pack_strip(
    const pack_t *job, const encoding_t *made, int64_t row, int64_t first, int64_t left, uint8_t *to, int tiles) {
    const int64_t count = left < STRIP_COLUMNS ? left : STRIP_COLUMNS;
    uint8_t codes[STRIP_COLUMNS] = {0};
    if (row < job->rows) unpack_strip(job->codes + row * ((job->columns + 127) / 128 * 32), first, count, codes);
    for (int64_t at = 0; at < count; at += GROUP_COLUMNS, to += tiles * TILE_BYTES) {
        const uint32_t word = encode_lane(made, pack_lane(codes + at));
        memcpy(to, &word, sizeof word);
    }
}

static void pack_scales(const pack_t *job, int64_t panel) {
    const int64_t count = job->columns / job->group;
    uint16_t *to = job->packed_scales + panel * count * PANEL_ROWS;
    for (int64_t s = 0; s < count; s++)
        for (int64_t row = panel * PANEL_ROWS; row < (panel + 1) * PANEL_ROWS; row++)
            *to++ = row < job->rows ? job->scales[row * count + s] : 0;
}

static void pack(pool_t *pool, const pack_t *job, int thread) {
    const encoding_t made = encoding();
    const int64_t span = job->group ? job->group : job->columns, count = job->columns / span;
    const int64_t groups = groups_of(span);
    for (int64_t panel; (panel = pool_take(pool, thread, panels_of(job->rows))) >= 0;) {
        const int tiles = panel_tiles(job->rows, panel);
        if (job->group) pack_scales(job, panel);
        uint8_t *to = job->packed + panel * PANEL_TILES * count * groups * TILE_BYTES;
        for (int64_t s = 0; s < count; s++, to += groups * tiles * TILE_BYTES)
            for (int64_t first = 0; first < span; first += STRIP_COLUMNS)
                for (int lane = 0; lane < tiles * TILE_ROWS; lane++)
                    pack_strip(
                        job, &made, panel * PANEL_ROWS + lane, s * span + first, span - first,
                        to + first / GROUP_COLUMNS * tiles * TILE_BYTES + 4 * lane, tiles);
    }
}

#endif
