/*
 * Ternary micro-kernels for AVX2. Where there is no VNNI, `vpmaddubsw` adds two neighbouring products in 16 bits: with
 * codes of at most 2 (8, 15) they are within ±512 (±2048, ±3840), so that 64 (16, 8) of them can be summed before they are
 * widened, and nothing ever saturates.
 */
#include <immintrin.h>

#define TILE_ROWS 8
#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4
#define GEMM_TILES 2
#define MAX_TILES 2
#define BLOCK_TOKENS 4
#if !defined(__AVXVNNI__)
#define LOOK_DOT_BLOCKS 0
#endif

/* Groups between widenings: 16 of four planes of at most ±512, or 4 of two of at most ±3840. */
#define WIDEN(bits) ((bits) == 2 ? 16 : 4)

INLINE __m256i plane_of(__m256i codes, const int p, const int bits) {
    return _mm256_and_si256(_mm256_srli_epi32(codes, bits * p), _mm256_set1_epi8((char)((1 << bits) - 1)));
}

INLINE __m256i four_of(const void *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

/* Peak arithmetic throughput, for probe.h. */
#define PEAK_PATHS 8
#define PEAK_PRODUCTS 32
#define PEAK_REGISTER "+x"
typedef __m256i peak_t;

#if defined(__AVXVNNI__)

INLINE peak_t peak_step(peak_t sum) { return _mm256_dpbusd_avx_epi32(sum, _mm256_set1_epi8(2), _mm256_set1_epi8(3)); }

INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    /* Planes 0 and 2 (shifted down by 4) count as they are; 1 and 3 weigh 4 and are summed apart. */
    const __m256i low = _mm256_set1_epi8(3), high = _mm256_set1_epi8(12);
    __m256i one[PANEL_TILES], four[PANEL_TILES];
    for (int t = 0; t < tiles; t++) one[t] = four[t] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; g++, x += 16) {
        const __m256i y0 = four_of(x), y1 = four_of(x + 4), y2 = four_of(x + 8), y3 = four_of(x + 12);
        for (int t = 0; t < tiles; t++, w += 32) {
            const __m256i codes = _mm256_loadu_si256((const __m256i *)w), upper = _mm256_srli_epi32(codes, 4);
            if (t % 2 == 0) _mm_prefetch(w + 8192, _MM_HINT_T1);
            one[t] = _mm256_dpbusd_avx_epi32(one[t], _mm256_and_si256(codes, low), y0);
            four[t] = _mm256_dpbusd_avx_epi32(four[t], _mm256_and_si256(codes, high), y1);
            one[t] = _mm256_dpbusd_avx_epi32(one[t], _mm256_and_si256(upper, low), y2);
            four[t] = _mm256_dpbusd_avx_epi32(four[t], _mm256_and_si256(upper, high), y3);
        }
    }
    for (int t = 0; t < tiles; t++) {
        __m256i all = _mm256_add_epi32(one[t], _mm256_srai_epi32(four[t], 2));
        _mm256_storeu_si256((__m256i *)(acc + 8 * t), all);
    }
}

#define ONE_BIT
/* acc[8 tiles] = Σ bit · x over a panel in one bit, for one token; `tiles` is a constant. Bits weigh 1 and 2, the others being
 * shifted down by two, four and six: the sums of these are apart. */
INLINE void bit_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const __m256i low = _mm256_set1_epi8(1), high = _mm256_set1_epi8(2);
    __m256i one[PANEL_TILES], two[PANEL_TILES];
    for (int t = 0; t < tiles; t++) one[t] = two[t] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; g++, w += 32 * tiles)
        for (int p = 0; p < 8; p += 2, x += 8) {
            const __m256i y0 = four_of(x), y1 = four_of(x + 4);
            for (int t = 0; t < tiles; t++) {
                const __m256i bits = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i *)(w + 32 * t)), p);
                if (p == 0 && t % 2 == 0) _mm_prefetch(w + 32 * t + 8192, _MM_HINT_T1);
                one[t] = _mm256_dpbusd_avx_epi32(one[t], _mm256_and_si256(bits, low), y0);
                two[t] = _mm256_dpbusd_avx_epi32(two[t], _mm256_and_si256(bits, high), y1);
            }
        }
    for (int t = 0; t < tiles; t++) {
        const __m256i all = _mm256_add_epi32(one[t], _mm256_srai_epi32(two[t], 1));
        _mm256_storeu_si256((__m256i *)(acc + 8 * t), all);
    }
}

INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    __m256i sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = _mm256_setzero_si256();
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        __m256i codes[MAX_TILES];
        for (int t = 0; t < tiles; t++) codes[t] = _mm256_loadu_si256((const __m256i *)(w + 32 * t));
        _mm_prefetch(w + 8192, _MM_HINT_T1);
        for (int p = 0; p < 8 / bits; p++, x += tokens) {
            __m256i plane[MAX_TILES];
            for (int t = 0; t < tiles; t++) plane[t] = plane_of(codes[t], p, bits);
            for (int m = 0; m < tokens; m++) {
                const __m256i y = four_of(x + m);
                for (int t = 0; t < tiles; t++) sum[t][m] = _mm256_dpbusd_avx_epi32(sum[t][m], plane[t], y);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++)
            _mm256_storeu_si256((__m256i *)(acc + m * acc_pitch + 8 * t), sum[t][m]);
}

#else

INLINE peak_t peak_step(peak_t sum) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(_mm256_set1_epi8(2), sum));
}

INLINE __m256i widen_add(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* Groups between widenings for one token: two products of at most ±2048 each, in 16 bits. */
#define WIDEN_ONE 7

INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    /* Planes 0 and 2 (shifted down by 4) count as they are; 1 and 3 weigh 4 and are summed apart. */
    const __m256i low = _mm256_set1_epi8(3), high = _mm256_set1_epi8(12);
    __m256i sum[PANEL_TILES];
    for (int t = 0; t < tiles; t++) sum[t] = _mm256_setzero_si256();
    for (int64_t first = 0; first < groups; first += WIDEN_ONE) {
        const int64_t last = first + WIDEN_ONE < groups ? first + WIDEN_ONE : groups;
        __m256i one[PANEL_TILES], four[PANEL_TILES];
        for (int t = 0; t < tiles; t++) one[t] = four[t] = _mm256_setzero_si256();
        for (int64_t g = first; g < last; g++, x += 16) {
            const __m256i y0 = four_of(x), y1 = four_of(x + 4), y2 = four_of(x + 8), y3 = four_of(x + 12);
            for (int t = 0; t < tiles; t++, w += 32) {
                const __m256i codes = _mm256_loadu_si256((const __m256i *)w), upper = _mm256_srli_epi32(codes, 4);
                if (t % 2 == 0) _mm_prefetch(w + 16384, _MM_HINT_T1);
                one[t] = _mm256_add_epi16(one[t], _mm256_maddubs_epi16(_mm256_and_si256(codes, low), y0));
                four[t] = _mm256_add_epi16(four[t], _mm256_maddubs_epi16(_mm256_and_si256(codes, high), y1));
                one[t] = _mm256_add_epi16(one[t], _mm256_maddubs_epi16(_mm256_and_si256(upper, low), y2));
                four[t] = _mm256_add_epi16(four[t], _mm256_maddubs_epi16(_mm256_and_si256(upper, high), y3));
            }
        }
        for (int t = 0; t < tiles; t++) {
            sum[t] = _mm256_add_epi32(sum[t], _mm256_madd_epi16(one[t], _mm256_set1_epi16(4)));
            sum[t] = widen_add(sum[t], four[t]);
        }
    }
    for (int t = 0; t < tiles; t++)
        _mm256_storeu_si256((__m256i *)(acc + 8 * t), _mm256_srai_epi32(sum[t], 2));
}

INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    /* The wide sums live in memory between widenings: registers hold the narrow ones. */
    __m256i sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = _mm256_setzero_si256();
    for (int64_t first = 0; first < groups; first += WIDEN(bits)) {
        const int64_t last = first + WIDEN(bits) < groups ? first + WIDEN(bits) : groups;
        __m256i pairs[MAX_TILES][BLOCK_TOKENS];
        for (int t = 0; t < tiles; t++)
            for (int m = 0; m < tokens; m++) pairs[t][m] = _mm256_setzero_si256();
        for (int64_t g = first; g < last; g++, w += pitch) {
            __m256i codes[MAX_TILES];
            for (int t = 0; t < tiles; t++) codes[t] = _mm256_loadu_si256((const __m256i *)(w + 32 * t));
            _mm_prefetch(w + 8192, _MM_HINT_T1);
            for (int p = 0; p < 8 / bits; p++, x += tokens) {
                __m256i plane[MAX_TILES];
                for (int t = 0; t < tiles; t++) plane[t] = plane_of(codes[t], p, bits);
                for (int m = 0; m < tokens; m++) {
                    const __m256i y = four_of(x + m);
                    for (int t = 0; t < tiles; t++)
                        pairs[t][m] = _mm256_add_epi16(pairs[t][m], _mm256_maddubs_epi16(plane[t], y));
                }
            }
        }
        for (int t = 0; t < tiles; t++)
            for (int m = 0; m < tokens; m++) sum[t][m] = widen_add(sum[t][m], pairs[t][m]);
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++)
            _mm256_storeu_si256((__m256i *)(acc + m * acc_pitch + 8 * t), sum[t][m]);
}

#endif
