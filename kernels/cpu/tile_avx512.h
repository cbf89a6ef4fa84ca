/* Ternary micro-kernels for AVX-512 with VNNI. */
#include "dot_avx512.h"

#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4

#define LOOK_DOT_BLOCKS 4

typedef struct {
    char none;
} tables_t;
INLINE tables_t tables(void) { return (tables_t){0}; }

/* A tile, and its p-th plane, a constant. */
typedef __m512i taken_t;
INLINE taken_t take_apart(const uint8_t *w, tables_t table) { return (void)table, _mm512_loadu_si512(w); }
INLINE __m512i plane_of(taken_t taken, const int p) {
    return _mm512_and_si512(_mm512_srli_epi32(taken, 2 * p), _mm512_set1_epi8(3));
}

/*
 * acc[16 tiles] = Σ codes · x over a panel, for one token; `tiles` is a constant.
 *
 * The four planes stay where they are in the byte, so each costs one mask and no shift: they weigh 1, 4, 16 and 64 and are
 * summed apart. The greatest, 2 · 64 · 128 · K / 4 for K = 131,072, is 2^29.
 */
INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const __m512i mask = _mm512_set1_epi8(3);
    __m512i sum[PANEL_TILES][4];
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < 4; p++) sum[t][p] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++, x += 16) {
        __m512i y[4];
        for (int p = 0; p < 4; p++) y[p] = four_of(x + 4 * p);
        for (int t = 0; t < tiles; t++, w += 64) {
            const __m512i codes = _mm512_loadu_si512(w);
            fetch(w, SOON);
            for (int p = 0; p < 4; p++)
                sum[t][p] = _mm512_dpbusd_epi32(sum[t][p], _mm512_and_si512(codes, _mm512_slli_epi32(mask, 2 * p)), y[p]);
        }
    }
    for (int t = 0; t < tiles; t++) {
        __m512i all = _mm512_add_epi32(sum[t][0], _mm512_srai_epi32(sum[t][1], 2));
        all = _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][2], 4));
        _mm512_storeu_si512(acc + 16 * t, _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][3], 6)));
    }
}
