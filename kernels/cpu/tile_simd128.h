/* Ternary micro-kernels for WebAssembly's vectors. Relaxed SIMD multiplies four bytes and adds the products to a row's lane
 * in one instruction. What it leaves open are second operands above 127 and sums of two products beyond 16 bits; codes are
 * 15 at most. Without it, a dot product of 16-bit lanes adds two products: the even bytes of a tile (columns 4p and 4p + 2
 * of plane p) are one operand, the odd bytes (4p + 1 and 4p + 3) another. A shift of 16-bit lanes and a mask take either
 * out of the packed codes, so that nothing is widened. */
#include <wasm_simd128.h>

#define TILE_ROWS 4
#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4
#define GEMM_TILES 2
#define MAX_TILES 2
#define BLOCK_TOKENS 4
#define LOOK_DOT_BLOCKS 0

#if defined(RELAXED) /* compiled apart, for their instructions: tile_relaxed.c */

void gemv_tiles(const uint8_t *w, int tiles, int64_t groups, const int8_t *x, int32_t *acc);
void plane_tiles(
    const uint8_t *w, int64_t pitch, int tiles, int64_t groups, const int32_t *x, int tokens, int32_t *acc, int acc_pitch,
    int bits);

#else

/* 16 activations or codes as the operand of a dot product: of activations, of codes from bit `shift` on, and with lane
 * `p` of its four in each of them. */
#if defined(__wasm_relaxed_simd__)

typedef v128_t bytes_t;
INLINE bytes_t activations_of(v128_t x) { return x; }
INLINE bytes_t codes_of(v128_t codes, int shift, int mask) {
    return wasm_v128_and(wasm_u16x8_shr(codes, shift), wasm_i8x16_splat((int8_t)mask));
}
#define SPREAD(x, p) wasm_i32x4_shuffle(x, x, p, p, p, p)
INLINE v128_t add_dot(v128_t sum, bytes_t codes, bytes_t x) {
    return wasm_i32x4_relaxed_dot_i8x16_i7x16_add(x, codes, sum);
}

#else

typedef struct {
    v128_t even, odd; /* 16-bit lanes */
} bytes_t;
INLINE bytes_t activations_of(v128_t x) {
    return (bytes_t){wasm_i16x8_shr(wasm_i16x8_shl(x, 8), 8), wasm_i16x8_shr(x, 8)};
}
INLINE bytes_t codes_of(v128_t codes, int shift, int mask) {
    const v128_t kept = wasm_i16x8_splat((int16_t)mask);
    return (bytes_t){
        wasm_v128_and(wasm_u16x8_shr(codes, shift), kept), wasm_v128_and(wasm_u16x8_shr(codes, 8 + shift), kept)};
}
#define SPREAD(x, p)                                                                                                       \
    (bytes_t) { wasm_i32x4_shuffle(x.even, x.even, p, p, p, p), wasm_i32x4_shuffle(x.odd, x.odd, p, p, p, p) }
INLINE v128_t add_dot(v128_t sum, bytes_t codes, bytes_t x) {
    sum = wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes.even, x.even));
    return wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(codes.odd, x.odd));
}

#endif

/* The second of two neighbouring planes is taken without a shift: it weighs 4, and is summed apart. */
INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    v128_t one[PANEL_TILES], four[PANEL_TILES];
    for (int t = 0; t < tiles; t++) one[t] = four[t] = wasm_i32x4_splat(0);
    for (int64_t g = 0; g < groups; g++, x += 16) {
        const bytes_t y = activations_of(wasm_v128_load(x));
        const bytes_t planes[4] = {SPREAD(y, 0), SPREAD(y, 1), SPREAD(y, 2), SPREAD(y, 3)};
        for (int t = 0; t < tiles; t++, w += 16) {
            const v128_t codes = wasm_v128_load(w);
            for (int p = 0; p < 4; p += 2) {
                one[t] = add_dot(one[t], codes_of(codes, 2 * p, 3), planes[p]);
                four[t] = add_dot(four[t], codes_of(codes, 2 * p, 12), planes[p + 1]);
            }
        }
    }
    for (int t = 0; t < tiles; t++) wasm_v128_store(acc + 4 * t, wasm_i32x4_add(one[t], wasm_i32x4_shr(four[t], 2)));
}

INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    v128_t sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = wasm_i32x4_splat(0);
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        v128_t codes[MAX_TILES];
        for (int t = 0; t < tiles; t++) codes[t] = wasm_v128_load(w + 16 * t);
        for (int p = 0; p < 8 / bits; p++, x += tokens) {
            bytes_t plane[MAX_TILES];
            for (int t = 0; t < tiles; t++) plane[t] = codes_of(codes[t], bits * p, (1 << bits) - 1);
            for (int m = 0; m < tokens; m++) {
                const bytes_t y = activations_of(wasm_v128_load32_splat(x + m));
                for (int t = 0; t < tiles; t++) sum[t][m] = add_dot(sum[t][m], plane[t], y);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) wasm_v128_store(acc + m * acc_pitch + 4 * t, sum[t][m]);
}

#endif

/* Peak arithmetic throughput, for probe.h: of dot products of 16-bit lanes in both libraries. */
#define PEAK_PATHS 8
#define PEAK_PRODUCTS 8
#define PEAK_REGISTER "+r"
typedef v128_t peak_t;
INLINE peak_t peak_step(peak_t sum) {
    return wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(wasm_i16x8_splat(2), wasm_i16x8_splat(3)));
}
