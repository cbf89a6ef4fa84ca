/*
 * Ternary micro-kernels for AVX-512 with VNNI and VBMI: five weights a byte, 1.6 bits a weight.
 *
 * The byte for each five digits t0 … t4 is chosen so that look-ups in 64 bytes (`vpermb`, one operation where
 * `vpermi2b` takes three) decode it. With u the upper and l the lower six bits of the byte,
 *     t4 = FIFTH[u]    and    t0 + 4 t1 + 16 t2 + 64 t3 = UPPER[u] ^ LOWER[l].
 * Write a byte as (h, m, l): two bits, four bits, two bits. Where h and l are below 3, h is t4, l is t0, and m is one of 16
 * of the 27 triples t1 t2 t3: 144 of the 243 combinations. h = 3 gives each m another triple and t4, and l = 3 gives
 * each m another triple and t0; a search over these choices found the remaining 99. `vpermb` reads the lower six bits
 * of an index only, so neither l nor the bits that a 16-bit shift leaves above u need masking.
 */
#include "dot_avx512.h"

#define GROUP_COLUMNS 20
#define BASE 3
#define PANEL_TILES 3
#if !defined(__AMX_INT8__)
#define LOOK_DOT_BLOCKS 4
#endif

static const _Alignas(64) uint8_t FIFTH[64] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
    0, 2, 0, 2, 0, 1, 2, 0, 1, 2, 1, 1, 2, 0, 1, 1,
};
static const _Alignas(64) uint8_t UPPER[64] = {
    80, 68, 148, 144, 16, 164, 0, 96, 24, 72, 8, 152, 104, 128, 88, 32,
    80, 68, 148, 144, 16, 164, 0, 96, 24, 72, 8, 152, 104, 128, 88, 32,
    80, 68, 148, 144, 16, 164, 0, 96, 24, 72, 8, 152, 104, 128, 88, 32,
    4, 4, 168, 36, 132, 132, 132, 136, 136, 136, 4, 168, 168, 36, 36, 20,
};
static const _Alignas(64) uint8_t LOWER[64] = {
    0, 1, 2, 16, 0, 1, 2, 16, 0, 1, 2, 190, 0, 1, 2, 50,
    0, 1, 2, 116, 0, 1, 2, 193, 0, 1, 2, 102, 0, 1, 2, 192,
    0, 1, 2, 185, 0, 1, 2, 9, 0, 1, 2, 74, 0, 1, 2, 205,
    0, 1, 2, 62, 0, 1, 2, 168, 0, 1, 2, 113, 0, 1, 2, 53,
};

/* The byte of each number t0 + 3 t1 + 9 t2 + 27 t3 + 81 t4, for packing; 0 for what is no such number. */
typedef struct {
    _Alignas(64) uint8_t byte[256];
} encoding_t;

INLINE encoding_t encoding(void) {
    encoding_t made = {0};
    for (int byte = 0; byte < 256; byte++) {
        const uint8_t four = UPPER[byte >> 2] ^ LOWER[byte & 63];
        int number = FIFTH[byte >> 2], valid = 1;
        for (int i = 3; i >= 0; i--) {
            valid &= (four >> 2 * i & 3) < 3;
            number = 3 * number + (four >> 2 * i & 3);
        }
        if (valid) made.byte[number] = (uint8_t)byte;
    }
    return made;
}

INLINE uint32_t encode_lane(const encoding_t *made, uint32_t numbers) {
    uint32_t lane = 0;
    for (int j = 0; j < 4; j++) lane |= (uint32_t)made->byte[numbers >> 8 * j & 0xff] << 8 * j;
    return lane;
}

typedef uint32_t lanes_t __attribute__((ext_vector_type(TILE_ROWS)));

INLINE lanes_t encode_lanes(const encoding_t *made, lanes_t numbers) {
    const __m512i index = (__m512i)numbers;
    const __m512i low = _mm512_permutex2var_epi8(
        _mm512_load_si512(made->byte), index, _mm512_load_si512(made->byte + 64));
    const __m512i high = _mm512_permutex2var_epi8(
        _mm512_load_si512(made->byte + 128), index, _mm512_load_si512(made->byte + 192));
    return (lanes_t)_mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

/* The p-th four neighbouring codes of a lane, one a byte. */
INLINE uint32_t plane_codes(uint32_t lane, int p) {
    uint32_t codes = 0;
    for (int j = 0; j < 4; j++) {
        const uint8_t byte = (uint8_t)(lane >> 8 * j), four = UPPER[byte >> 2] ^ LOWER[byte & 63];
        codes |= (uint32_t)(p == 4 ? FIFTH[byte >> 2] : four >> 2 * p & 3) << 8 * j;
    }
    return codes;
}

typedef struct {
    __m512i fifth, upper, lower;
} tables_t;

INLINE tables_t tables(void) {
    return (tables_t){_mm512_load_si512(FIFTH), _mm512_load_si512(UPPER), _mm512_load_si512(LOWER)};
}

/* Look-ups for every byte: the last digit, and two halves whose exclusive or is the first four, two bits each. */
typedef struct {
    __m512i fifth, upper, lower;
} digits_t;

INLINE digits_t digits_of(__m512i bytes, tables_t table) {
    const __m512i upper = _mm512_srli_epi16(bytes, 2);
    return (digits_t){
        _mm512_permutexvar_epi8(upper, table.fifth), _mm512_permutexvar_epi8(upper, table.upper),
        _mm512_permutexvar_epi8(bytes, table.lower)};
}

INLINE __m512i first_four(digits_t digits) { return _mm512_xor_si512(digits.upper, digits.lower); }

/* A tile decoded except for shifts, and its p-th plane, a constant. */
typedef struct {
    __m512i four, fifth;
} taken_t;

INLINE taken_t take_apart(const uint8_t *w, tables_t table) {
    const digits_t digits = digits_of(_mm512_loadu_si512(w), table);
    return (taken_t){first_four(digits), digits.fifth};
}

INLINE __m512i plane_of(taken_t taken, const int p) {
    return p == 4 ? taken.fifth : _mm512_and_si512(_mm512_srli_epi32(taken.four, 2 * p), _mm512_set1_epi8(3));
}

#if defined(__AMX_INT8__)
#define GEMV_SOON 512 /* processors with AMX read up to a twentieth faster than with SOON, AMD's some percent slower */
#else
#define GEMV_SOON SOON
#endif

/*
 * acc[16 tiles] = Σ codes · x over a panel, for one token; `tiles` is a constant.
 *
 * The four planes stay where they are in the byte, so each costs one operation, (upper ^ lower) & mask, and no shift: they
 * weigh 1, 4, 16 and 64 and are summed apart. The greatest, 2 · 64 · 128 · K / 5 for K = 131,072, is below 2^29.
 *
 * A tile is decoded while the one before it is multiplied, so that look-ups and products do not wait for each other;
 * the last one decoded, behind the panel, is not used.
 */
INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const tables_t table = tables();
    __m512i sum[PANEL_TILES][4];
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < 4; p++) sum[t][p] = _mm512_setzero_si512();
    digits_t digits = digits_of(_mm512_loadu_si512(w), table);
    for (int64_t g = 0; g < groups; g++, x += GROUP_COLUMNS) {
        __m512i y[5];
        for (int p = 0; p < 5; p++) y[p] = four_of(x + 4 * p);
        for (int t = 0; t < tiles; t++) {
            w += 64;
            const digits_t next = digits_of(_mm512_loadu_si512(w), table);
            for (int p = 0; p < 4; p++) {
                const __m512i mask = _mm512_set1_epi8((char)(3 << 2 * p));
                const __m512i plane = _mm512_ternarylogic_epi32(digits.upper, digits.lower, mask, 0x28);
                sum[t][p] = _mm512_dpbusd_epi32(sum[t][p], plane, y[p]);
            }
            sum[t][0] = _mm512_dpbusd_epi32(sum[t][0], digits.fifth, y[4]);
            fetch(w, GEMV_SOON);
            digits = next;
        }
    }
    for (int t = 0; t < tiles; t++) {
        __m512i all = _mm512_add_epi32(sum[t][0], _mm512_srai_epi32(sum[t][1], 2));
        all = _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][2], 4));
        _mm512_storeu_si512(acc + 16 * t, _mm512_add_epi32(all, _mm512_srai_epi32(sum[t][3], 6)));
    }
}

/* As `plane_tiles`: every plane is brought down to 0, 1, 2 once, and used by all tokens. */
INLINE void gemm_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc) {
    const tables_t table = tables();
    __m512i sum[PANEL_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = _mm512_setzero_si512();
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        taken_t taken[PANEL_TILES];
        for (int t = 0; t < tiles; t++) taken[t] = take_apart(w + 64 * t, table);
        /* All tiles of the panel, not only those of this pass: the next one then finds its own in the cache. */
        for (int t = 0; t < PANEL_TILES; t++) fetch(w + 64 * t, SOON);
        for (int p = 0; p < 5; p++, x += tokens) {
            __m512i plane[PANEL_TILES];
            for (int t = 0; t < tiles; t++) plane[t] = plane_of(taken[t], p);
            for (int m = 0; m < tokens; m++) {
                const __m512i y = four_of(x + m);
                for (int t = 0; t < tiles; t++) sum[t][m] = _mm512_dpbusd_epi32(sum[t][m], plane[t], y);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) _mm512_storeu_si512(acc + m * PANEL_TILES * TILE_ROWS + 16 * t, sum[t][m]);
}
