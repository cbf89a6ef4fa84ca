/* Shared by the AVX-512 levels: `vpdpbusd` adds four products of unsigned and signed bytes to each lane. */
#include <immintrin.h>

#define TILE_ROWS 16
#define BLOCK_TOKENS 8
#define GEMM_TILES 2 /* for BLOCK_TOKENS tokens: 16 sums; with more the compiler spills decoded weights */
#define MAX_TILES 4 /* for fewer tokens */

INLINE __m512i four_of(const void *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

#define SOON 2048 /* bytes */

/* Prefetch the weights that follow, a line at a time: into the second-level cache from memory, and into the first `soon` bytes
 * before they are used. */
INLINE void fetch(const uint8_t *w, const int soon) {
    _mm_prefetch(w + soon, _MM_HINT_T0);
    _mm_prefetch(w + 16384, _MM_HINT_T1);
}

/* The same for plane_tiles, whose passes take a `part` of the tiles, or all of them and so memory front to back. Processors
 * with AMX read a sixth faster where each line is prefetched twice; AMD's, which have VBMI without AMX, find the order by
 * themselves, and read a twentieth faster without prefetching. */
INLINE void fetch_planes(const uint8_t *w, const int part) {
#if defined(__AVX512VBMI__) && !defined(__AMX_INT8__)
    if (part) _mm_prefetch(w + 4096, _MM_HINT_T0);
#else
    (void)part;
    fetch(w, SOON);
#endif
}

/*
 * acc[token · acc_pitch + row] = Σ codes · x for `tokens` tokens and `tiles` neighbouring tiles, both constants; tiles of
 * one group of columns are `pitch` bytes from those of the next. Codes have `bits` bits, 2 or 4; x holds four activations
 * of each token for each plane. A plane is shifted down once and used by every token.
 */
INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    const __m512i mask = _mm512_set1_epi8((char)((1 << bits) - 1));
    __m512i sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        __m512i codes[MAX_TILES];
        for (int t = 0; t < tiles; t++) codes[t] = _mm512_loadu_si512(w + 64 * t);
        /* All tiles, not only those of this pass: the next one finds its own in the cache. */
        for (int64_t line = 0; line < pitch; line += 64) fetch_planes(w + line, tiles * 64 < pitch);
        for (int p = 0; p < 8 / bits; p++, x += tokens) {
            __m512i plane[MAX_TILES];
            for (int t = 0; t < tiles; t++) plane[t] = _mm512_and_si512(_mm512_srli_epi32(codes[t], bits * p), mask);
            for (int m = 0; m < tokens; m++) {
                const __m512i y = four_of(x + m);
                for (int t = 0; t < tiles; t++) sum[t][m] = _mm512_dpbusd_epi32(sum[t][m], plane[t], y);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) _mm512_storeu_si512(acc + m * acc_pitch + 16 * t, sum[t][m]);
}

#define ONE_BIT
/*
 * acc[16 tiles] = Σ bit · x over a panel in one bit, for one token; `tiles` is a constant. Bits stay where they are in the
 * byte, the upper four after a shift by four, and weigh 1, 2, 4 and 8: the sums of these are apart.
 */
INLINE void bit_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const __m512i mask = _mm512_set1_epi8(1);
    __m512i sum[MAX_TILES][4];
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < 4; p++) sum[t][p] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++, x += 32) {
        __m512i y[8];
        for (int p = 0; p < 8; p++) y[p] = four_of(x + 4 * p);
        for (int t = 0; t < tiles; t++, w += 64) {
            const __m512i low = _mm512_loadu_si512(w), high = _mm512_srli_epi32(low, 4);
            fetch(w, SOON);
            for (int p = 0; p < 4; p++) {
                const __m512i bit = _mm512_slli_epi32(mask, p);
                sum[t][p] = _mm512_dpbusd_epi32(sum[t][p], _mm512_and_si512(low, bit), y[p]);
                sum[t][p] = _mm512_dpbusd_epi32(sum[t][p], _mm512_and_si512(high, bit), y[p + 4]);
            }
        }
    }
    for (int t = 0; t < tiles; t++) {
        __m512i all = _mm512_add_epi32(sum[t][0], _mm512_srai_epi32(sum[t][1], 1));
        all = _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][2], 2));
        _mm512_storeu_si512(acc + 16 * t, _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][3], 3)));
    }
}

/* Peak arithmetic throughput, for probe.h. */
#define PEAK_PATHS 16
#define PEAK_PRODUCTS 64
#define PEAK_REGISTER "+v"
typedef __m512i peak_t;
INLINE peak_t peak_step(peak_t sum) { return _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(2), _mm512_set1_epi8(3)); }
