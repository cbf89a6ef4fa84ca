/* Ternary micro-kernels for WebAssembly's vectors. A dot product of 16-bit lanes adds two products to each row's lane: the
 * even bytes of a tile (columns 4p and 4p + 2 of plane p) are one operand, the odd bytes (4p + 1 and 4p + 3) another. A
 * shift of 16-bit lanes and a mask take either out of the packed codes, so that nothing is widened. */
#include <wasm_simd128.h>

#define TILE_ROWS 4
#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4
#define GEMM_TILES 2
#define MAX_TILES 2
#define BLOCK_TOKENS 4
#define LOOK_DOT_BLOCKS 0

/* The even bytes, and the odd ones, of activations as 16-bit numbers. */
INLINE v128_t even_of(v128_t x) { return wasm_i16x8_shr(wasm_i16x8_shl(x, 8), 8); }
INLINE v128_t odd_of(v128_t x) { return wasm_i16x8_shr(x, 8); }

INLINE v128_t add_dot(v128_t sum, v128_t a, v128_t b) { return wasm_i32x4_add(sum, wasm_i32x4_dot_i16x8(a, b)); }

/* The second of two neighbouring planes is taken without a shift: it weighs 4, and is summed apart. */
INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const v128_t first = wasm_i16x8_splat(3), second = wasm_i16x8_splat(12);
    v128_t one[PANEL_TILES], four[PANEL_TILES];
    for (int t = 0; t < tiles; t++) one[t] = four[t] = wasm_i32x4_splat(0);
    for (int64_t g = 0; g < groups; g++, x += 16) {
        const v128_t y = wasm_v128_load(x), even = even_of(y), odd = odd_of(y);
#define PLANE(of, p) wasm_i32x4_shuffle(of, of, p, p, p, p)
        const v128_t evens[4] = {PLANE(even, 0), PLANE(even, 1), PLANE(even, 2), PLANE(even, 3)};
        const v128_t odds[4] = {PLANE(odd, 0), PLANE(odd, 1), PLANE(odd, 2), PLANE(odd, 3)};
#undef PLANE
        for (int t = 0; t < tiles; t++, w += 16) {
            const v128_t codes = wasm_v128_load(w);
            for (int p = 0; p < 4; p += 2) {
                const v128_t low = wasm_u16x8_shr(codes, 2 * p), high = wasm_u16x8_shr(codes, 8 + 2 * p);
                one[t] = add_dot(one[t], wasm_v128_and(low, first), evens[p]);
                one[t] = add_dot(one[t], wasm_v128_and(high, first), odds[p]);
                four[t] = add_dot(four[t], wasm_v128_and(low, second), evens[p + 1]);
                four[t] = add_dot(four[t], wasm_v128_and(high, second), odds[p + 1]);
            }
        }
    }
    for (int t = 0; t < tiles; t++) wasm_v128_store(acc + 4 * t, wasm_i32x4_add(one[t], wasm_i32x4_shr(four[t], 2)));
}

INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    const v128_t mask = wasm_i16x8_splat((int16_t)((1 << bits) - 1));
    v128_t sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = wasm_i32x4_splat(0);
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        v128_t codes[MAX_TILES];
        for (int t = 0; t < tiles; t++) codes[t] = wasm_v128_load(w + 16 * t);
        for (int p = 0; p < 8 / bits; p++, x += tokens) {
            v128_t low[MAX_TILES], high[MAX_TILES];
            for (int t = 0; t < tiles; t++) {
                low[t] = wasm_v128_and(wasm_u16x8_shr(codes[t], bits * p), mask);
                high[t] = wasm_v128_and(wasm_u16x8_shr(codes[t], 8 + bits * p), mask);
            }
            for (int m = 0; m < tokens; m++) {
                const v128_t y = wasm_v128_load32_splat(x + m), even = even_of(y), odd = odd_of(y);
                for (int t = 0; t < tiles; t++) sum[t][m] = add_dot(add_dot(sum[t][m], low[t], even), high[t], odd);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) wasm_v128_store(acc + m * acc_pitch + 4 * t, sum[t][m]);
}

/* Peak arithmetic throughput, for probe.h. */
#define PEAK_PATHS 8
#define PEAK_PRODUCTS 8
#define PEAK_REGISTER "+r"
typedef v128_t peak_t;
INLINE peak_t peak_step(peak_t sum) { return add_dot(sum, wasm_i16x8_splat(2), wasm_i16x8_splat(3)); }
