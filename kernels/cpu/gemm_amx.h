/*
 * Ternary products of many tokens on AMX, whose registers are tiles of 16 rows of 64 bytes.
 *
 * `tdpbsud` multiplies a tile of 16 tokens by 64 columns with one of 64 columns by 16 rows, the latter four columns of
 * every row side by side: one plane of a packed tile. So the weights are decoded plane by plane into tiles,
 * MATRIX_GROUPS groups of columns at a time, and every token of a pass uses them from the cache; the activations are read
 * as they lie. The sums of more than 16 tokens stay in memory between one piece of the columns and the next.
 *
 * Only five of the eight registers are used: more are slower if the core's other thread also uses some.
 */
#ifndef BN_GEMM_AMX_H
#define BN_GEMM_AMX_H

#include "tile_layout.h"

typedef struct {
    int tokens; /* rows of a tile of activations, as the registers are configured now; 0 before that */
} matrix_registers_t;

#if defined(__AMX_INT8__)

#define PASS_TOKENS ITEM_TOKENS
#define MIN_MATRIX_TOKENS 4 /* minimum tokens for which AMX is faster */
#define MATRIX_TOKENS 16 /* of a tile of activations, at most */
#define MATRIX_PLANES 16 /* four columns each, of a tile of weights */
#define MATRIX_GROUPS 16 /* whose 80 planes are whole tiles */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} matrix_shapes_t;

/* Give the registers their shapes: 0 to 2 hold sums and 3 activations of `tokens` tokens, 4 weights, 5 more sums. */
INLINE void matrix_shape(int tokens) {
    matrix_shapes_t shapes = {.palette = 1};
    for (int i = 0; i < 6; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = (uint8_t)(i == 4 ? MATRIX_PLANES : tokens);
    }
    _tile_loadconfig(&shapes);
}

typedef uint8_t planes_t[PANEL_TILES][MATRIX_GROUPS * 5][64];

/* Bits 2p and 2p + 1 of every byte as bits 0 and 1, in one operation: a product with a matrix of bits, whose last byte says
 * which bits make bit 0, and the one before it bit 1. */
INLINE __m512i digit_of(__m512i digits, const int p) {
    return _mm512_gf2p8affine_epi64_epi8(digits, _mm512_set1_epi64((int64_t)(UINT64_C(0x0102) << (48 + 2 * p))), 0);
}

/* Decode the planes of a panel's tiles, from `groups` groups of columns; the rest of the last tile of weights is zeros. */
INLINE void matrix_unpack(const uint8_t *w, int tiles, int groups, tables_t table, planes_t planes) {
    for (int g = 0; g < groups; g++)
        for (int t = 0; t < tiles; t++, w += 64) {
            const digits_t found = digits_of(_mm512_loadu_si512(w), table);
            const __m512i digits = first_four(found);
            fetch(w, SOON);
            for (int p = 0; p < 4; p++)
                _mm512_store_si512(planes[t][5 * g + p], digit_of(digits, p));
            _mm512_store_si512(planes[t][5 * g + 4], found.fifth);
        }
    for (int p = 5 * groups; p % MATRIX_PLANES; p++)
        for (int t = 0; t < tiles; t++) _mm512_store_si512(planes[t][p], _mm512_setzero_si512());
}

/*
 * acc[token · PANEL_ROWS + row] = Σ codes · x over a panel. `tokens` is what matrix_shape was told, or a multiple of it;
 * up to a vector of x behind the columns is read. Sums of tiles that the last panel lacks are meaningless.
 */
static void matrix_panel(
    const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int64_t stride, int tokens, int32_t *acc) {
    _Alignas(64) planes_t planes;
    const tables_t table = tables();
    const int64_t pitch = PANEL_TILES * TILE_ROWS * (int64_t)sizeof *acc;
    const bool stay = tokens <= MATRIX_TOKENS; /* the sums, in registers */
    for (int64_t g = 0; g < groups; g += MATRIX_GROUPS, x += MATRIX_GROUPS * GROUP_COLUMNS) {
        const int piece = groups - g < MATRIX_GROUPS ? (int)(groups - g) : MATRIX_GROUPS;
        matrix_unpack(w + g * tiles * 64, tiles, piece, table, planes);
        for (int m = 0; m < tokens; m += MATRIX_TOKENS) {
            int32_t *sums = acc + m * PANEL_TILES * TILE_ROWS;
            if (g == 0) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
            } else if (!stay) {
                _tile_loadd(0, sums, pitch);
                _tile_loadd(1, sums + TILE_ROWS, pitch);
                _tile_loadd(2, sums + 2 * TILE_ROWS, pitch);
            }
            for (int i = 0; i * MATRIX_PLANES < 5 * piece; i++) {
                _tile_loadd(3, x + m * stride + i * 64, stride);
                _tile_loadd(4, planes[0][i * MATRIX_PLANES], 64);
                _tile_dpbsud(0, 3, 4);
                _tile_loadd(4, planes[1][i * MATRIX_PLANES], 64);
                _tile_dpbsud(1, 3, 4);
                _tile_loadd(4, planes[2][i * MATRIX_PLANES], 64);
                _tile_dpbsud(2, 3, 4);
            }
            if (stay && g + piece < groups) continue;
            _tile_stored(0, sums, pitch);
            _tile_stored(1, sums + TILE_ROWS, pitch);
            _tile_stored(2, sums + 2 * TILE_ROWS, pitch);
        }
    }
}
_Static_assert(PANEL_TILES == 3, "matrix_panel names the registers of three tiles");

INLINE bool matrix_takes(int64_t tokens) { return tokens >= MIN_MATRIX_TOKENS; }

/* A panel by the tokens from `first` on: as many of `left` as fill whole tiles, or else all. Returns how many. */
INLINE int matrix_pass(
    matrix_registers_t *registers, const uint8_t *w, int tiles, const matrix_t *x, int64_t first, int left,
    int32_t *acc) {
    const int tokens = left < MATRIX_TOKENS ? left : left / MATRIX_TOKENS * MATRIX_TOKENS;
    const int shape = tokens < MATRIX_TOKENS ? tokens : MATRIX_TOKENS;
    if (shape != registers->tokens) matrix_shape(registers->tokens = shape);
    const int8_t *from = (const int8_t *)x->data + first * x->stride;
    matrix_panel(w, tiles, groups_of(x->columns), from, x->stride, tokens, acc);
    return tokens;
}

/* Release the registers, so that they need not be saved on a context switch. */
INLINE void matrix_end(const matrix_registers_t *registers) {
    if (registers->tokens) _tile_release();
}

/* Peak arithmetic throughput, which probe.h measures on the other levels. */
static int64_t probe_int8(int64_t turns, int32_t *result) {
    int32_t sum[MATRIX_TOKENS * TILE_ROWS];
    memset(sum, 1, sizeof sum);
    matrix_shape(MATRIX_TOKENS);
    _tile_loadd(3, sum, 64);
    _tile_loadd(4, sum, 64);
    for (int64_t i = 0; i < turns; i++) {
        _tile_dpbsud(0, 3, 4);
        _tile_dpbsud(1, 3, 4);
        _tile_dpbsud(2, 3, 4);
        _tile_dpbsud(5, 3, 4);
    }
    _tile_stored(0, sum, 64);
    _tile_release();
    *result = sum[0];
    return turns * 4 * MATRIX_TOKENS * TILE_ROWS * 4 * MATRIX_PLANES;
}

#else

#define PASS_TOKENS BLOCK_TOKENS

INLINE bool matrix_takes(int64_t tokens) { return (void)tokens, false; }

INLINE int matrix_pass(
    matrix_registers_t *registers, const uint8_t *w, int tiles, const matrix_t *x, int64_t first, int left,
    int32_t *acc) {
    (void)registers, (void)w, (void)tiles, (void)x, (void)first, (void)acc;
    return left;
}

INLINE void matrix_end(const matrix_registers_t *registers) { (void)registers; }

#endif
#endif
