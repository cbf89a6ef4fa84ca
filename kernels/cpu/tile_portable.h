/*
 * Ternary micro-kernels in portable C: the compiler maps the fixed-size vectors to what the processor has (SSE2, NEON
 * without dot products, or none at all). Products are summed in 16 bits and widened in time.
 */
#define TILE_ROWS 4
#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4
#define GEMM_TILES 1
#define MAX_TILES 1
#define BLOCK_TOKENS 4
#define LOOK_DOT_BLOCKS 0

typedef uint8_t bytes16 __attribute__((ext_vector_type(16)));
typedef int16_t shorts16 __attribute__((ext_vector_type(16)));
typedef int32_t ints16 __attribute__((ext_vector_type(16)));

/* Groups between widenings: 16 of four planes of at most ±256, or 4 of two of at most ±1920. */
#define WIDEN(bits) ((bits) == 2 ? 16 : 4)

/* Four activations, repeated for each row of the tile. */
INLINE shorts16 four_of(const void *x) {
    int8_t a[4];
    memcpy(a, x, sizeof a);
    return (shorts16){a[0], a[1], a[2], a[3], a[0], a[1], a[2], a[3], a[0], a[1], a[2], a[3], a[0], a[1], a[2], a[3]};
}

INLINE shorts16 plane_of(const uint8_t *w, const int p, const int bits) {
    bytes16 codes;
    memcpy(&codes, w, sizeof codes);
    return __builtin_convertvector(codes >> (uint8_t)(bits * p) & (uint8_t)((1 << bits) - 1), shorts16);
}

INLINE void store_rows(int32_t *acc, ints16 sum) {
    for (int r = 0; r < 4; r++) acc[r] = sum[4 * r] + sum[4 * r + 1] + sum[4 * r + 2] + sum[4 * r + 3];
}

INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    (void)tiles;
    ints16 sum[BLOCK_TOKENS];
    for (int m = 0; m < tokens; m++) sum[m] = (ints16)(0);
    for (int64_t first = 0; first < groups; first += WIDEN(bits)) {
        const int64_t last = first + WIDEN(bits) < groups ? first + WIDEN(bits) : groups;
        shorts16 narrow[BLOCK_TOKENS];
        for (int m = 0; m < tokens; m++) narrow[m] = (shorts16)(0);
        for (int64_t g = first; g < last; g++, w += pitch)
            for (int p = 0; p < 8 / bits; p++, x += tokens) {
                const shorts16 plane = plane_of(w, p, bits);
                for (int m = 0; m < tokens; m++) narrow[m] += plane * four_of(x + m);
            }
        for (int m = 0; m < tokens; m++) sum[m] += __builtin_convertvector(narrow[m], ints16);
    }
    for (int m = 0; m < tokens; m++) store_rows(acc + m * acc_pitch, sum[m]);
}

INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    ints16 sum[PANEL_TILES];
    for (int t = 0; t < tiles; t++) sum[t] = (ints16)(0);
    for (int64_t first = 0; first < groups; first += WIDEN(2)) {
        const int64_t last = first + WIDEN(2) < groups ? first + WIDEN(2) : groups;
        shorts16 narrow[PANEL_TILES];
        for (int t = 0; t < tiles; t++) narrow[t] = (shorts16)(0);
        for (int64_t g = first; g < last; g++, x += 16, w += tiles * 16)
            for (int p = 0; p < 4; p++) {
                const shorts16 y = four_of(x + 4 * p);
                for (int t = 0; t < tiles; t++) narrow[t] += plane_of(w + 16 * t, p, 2) * y;
            }
        for (int t = 0; t < tiles; t++) sum[t] += __builtin_convertvector(narrow[t], ints16);
    }
    for (int t = 0; t < tiles; t++) store_rows(acc + 4 * t, sum[t]);
}

/* Peak arithmetic throughput, for probe.h: eight products in 16 bits. */
#define PEAK_PATHS 8
#define PEAK_PRODUCTS 8
#if defined(__x86_64__)
#define PEAK_REGISTER "+x"
#elif defined(__aarch64__)
#define PEAK_REGISTER "+w"
#else
#define PEAK_REGISTER "+m"
#endif
typedef int16_t peak_t __attribute__((ext_vector_type(8)));
INLINE peak_t peak_step(peak_t sum) { return sum + sum * (int16_t)3; }
