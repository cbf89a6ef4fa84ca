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

/* A 32-bit lane of each row of a tile. */
typedef uint32_t lanes_t __attribute__((ext_vector_type(TILE_ROWS)));

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

/* Columns of a tile of one bit a weight: bit p of byte j of lane r holds the column 4p + j of row r, 1 for +1. */
#define BIT_COLUMNS 32
#define BIT_PLANES (BIT_COLUMNS / 4)

/* Bytes of a packed matrix. Columns are packed `group` at a time, or all together where it is 0. */
static size_t packed_bytes(int64_t rows, int64_t columns, int64_t group, int64_t binary) {
    if (binary) return (size_t)(tiles_of(rows) * (columns / BIT_COLUMNS) * TILE_BYTES);
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
INLINE lanes_t encode_lanes(const encoding_t *made, lanes_t numbers) {
    (void)made;
    return numbers;
}
/* The p-th four neighbouring codes of a lane, one a byte. */
INLINE uint32_t plane_codes(uint32_t lane, int p) { return lane >> 2 * p & 0x03030303; }
#endif

/* Columns that are packed at a time: whole blocks of 128, and whole groups. */
#define STRIP_COLUMNS 640
#define STRIP_WORDS ((STRIP_COLUMNS + 128) / 16) /* of a row: a strip of a group may begin and end within a block */
_Static_assert(STRIP_COLUMNS % 128 == 0 && STRIP_COLUMNS % GROUP_COLUMNS == 0, "a strip is whole blocks and whole groups");

/* Vector i gets lane i of every vector. */
INLINE void transpose(lanes_t *rows) {
    typedef uint32_t pair_t __attribute__((ext_vector_type(2 * TILE_ROWS)));
    for (int turn = 1; turn < TILE_ROWS; turn *= 2) {
        lanes_t next[TILE_ROWS];
        for (int i = 0; i < TILE_ROWS / 2; i++) {
            pair_t both;
            both.lo = rows[2 * i], both.hi = rows[2 * i + 1];
            next[i] = both.even, next[TILE_ROWS / 2 + i] = both.odd;
        }
        memcpy(rows, next, sizeof next);
    }
}

/* The words of a tile's rows from `block` on, those of its rows side by side; 0 past the last row. */
INLINE void load_words(const pack_t *job, int64_t row, int64_t block, int64_t words, lanes_t *to) {
    const int64_t stride = (job->columns + 127) / 128 * 32;
    const uint8_t *from = job->codes + row * stride + 32 * block;
    const int rows = job->rows - row < TILE_ROWS ? (int)(job->rows - row) : TILE_ROWS;
    if (rows == TILE_ROWS && words >= TILE_ROWS) {
        for (int64_t next = 0; next < words; next += TILE_ROWS) {
            const int64_t w = next < words - TILE_ROWS ? next : words - TILE_ROWS; /* the last ones overlap */
            lanes_t square[TILE_ROWS];
            for (int r = 0; r < TILE_ROWS; r++) {
                memcpy(square + r, from + r * stride + 4 * w, sizeof *square);
                __builtin_prefetch(from + (r + PANEL_ROWS) * stride + 4 * w, 0, 2); /* the next panel's */
            }
            transpose(square);
            memcpy(to + w, square, sizeof square);
        }
        return;
    }
    if (rows < TILE_ROWS) memset(to, 0, (size_t)words * sizeof *to);
    for (int r = 0; r < rows; r++, from += stride)
        for (int64_t w = 0; w < words; w++) memcpy((uint8_t *)(to + w) + 4 * r, from + 4 * w, 4);
}

/* A strip of a tile's rows, of `left` columns at most from `first` on, a multiple of 32, into tiles that stand `tiles` apart.
 *
 * Word j of a block of 128 columns holds the codes of the four columns from 4 j on, one in each byte's top bits, and below them
 * those of the columns 32, 64 and 96 further on. So a shift and a mask make a plane of any four neighbouring columns, in
 * all rows at once, and a lane of the tile comes of its planes by Horner's rule: no number exceeds its byte. */
INLINE void pack_strip(
    const pack_t *job, const encoding_t *made, int64_t row, int64_t first, int64_t left, uint8_t *to, int tiles) {
    lanes_t words[STRIP_WORDS], planes[4 * STRIP_WORDS + PLANES];
    const int64_t count = left < STRIP_COLUMNS ? left : STRIP_COLUMNS, ahead = first % 128;
    const int64_t blocks = (ahead + count + 127) / 128, end = (count + 3) / 4;
    load_words(job, row, first / 128, 8 * blocks, words);
    for (int64_t b = 0; b < blocks; b++)
        for (uint32_t quarter = 0; quarter < 4; quarter++)
            for (int w = 0; w < 8; w++)
                planes[32 * b + 8 * quarter + w] = words[8 * b + w] >> (6 - 2 * quarter) & 0x03030303;
    lanes_t *plane = planes + ahead / 4;
    if (count % 4) plane[end - 1] &= (1u << 8 * (count % 4)) - 1;
    for (int p = 0; p < PLANES; p++) plane[end + p] = (lanes_t)(0);
    for (int64_t at = 0; at < count; at += GROUP_COLUMNS, plane += PLANES, to += tiles * TILE_BYTES) {
        lanes_t numbers = plane[PLANES - 1];
        for (int p = PLANES - 2; p >= 0; p--) numbers = numbers * BASE + plane[p];
        numbers = encode_lanes(made, numbers);
        memcpy(to, &numbers, TILE_BYTES);
    }
}

/* A tile's rows in one bit a weight: the upper bits of codes that are 0 and 2. Tiles stand `tiles` apart. */
INLINE void pack_bits(const pack_t *job, int64_t row, uint8_t *to, int tiles) {
    for (int64_t block = 0; block < job->columns / 128; block++) {
        lanes_t words[8];
        load_words(job, row, block, 8, words);
        for (uint32_t quarter = 0; quarter < 4; quarter++, to += tiles * TILE_BYTES) {
            lanes_t bits = (lanes_t)(0);
            for (uint32_t p = 0; p < BIT_PLANES; p++) bits |= (words[p] >> (7 - 2 * quarter) & 0x01010101) << p;
            memcpy(to, &bits, TILE_BYTES);
        }
    }
}

static void pack_scales(const pack_t *job, int64_t panel) {
    const int64_t count = job->columns / job->group;
    uint16_t *to = job->packed_scales + panel * count * PANEL_ROWS;
    for (int64_t s = 0; s < count; s++)
        for (int64_t row = panel * PANEL_ROWS; row < (panel + 1) * PANEL_ROWS; row++)
            *to++ = row < job->rows ? job->scales[row * count + s] : 0;
}

/* A panel in several digits a byte. */
INLINE void pack_panel(const pack_t *job, const encoding_t *made, int64_t panel, uint8_t *to) {
    const int64_t span = job->group ? job->group : job->columns, groups = groups_of(span);
    const int tiles = panel_tiles(job->rows, panel);
    for (int64_t begin = 0; begin < job->columns; begin += span, to += groups * tiles * TILE_BYTES)
        for (int64_t first = 0; first < span; first += STRIP_COLUMNS)
            for (int tile = 0; tile < tiles; tile++)
                pack_strip(
                    job, made, panel * PANEL_ROWS + tile * TILE_ROWS, begin + first, span - first,
                    to + (first / GROUP_COLUMNS * tiles + tile) * TILE_BYTES, tiles);
}

static void pack(pool_t *pool, const pack_t *job, int thread) {
    const encoding_t made = encoding();
    const int64_t span = job->group ? job->group : job->columns, groups = job->columns / span * groups_of(span);
    for (int64_t panel; (panel = pool_take(pool, thread, panels_of(job->rows))) >= 0;) {
        const int tiles = panel_tiles(job->rows, panel);
        if (job->group) pack_scales(job, panel);
        if (job->binary) {
            uint8_t *bits = job->packed + panel * PANEL_TILES * (job->columns / BIT_COLUMNS) * TILE_BYTES;
            for (int tile = 0; tile < tiles; tile++)
                pack_bits(job, panel * PANEL_ROWS + tile * TILE_ROWS, bits + tile * TILE_BYTES, tiles);
            continue;
        }
        pack_panel(job, &made, panel, job->packed + panel * PANEL_TILES * groups * TILE_BYTES);
    }
}

#endif
