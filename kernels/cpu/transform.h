/* The Walsh-Hadamard transform of a row in f32: times signs, then blocks times Sylvester's matrix / sqrt(block). */
#ifndef BN_TRANSFORM_H
#define BN_TRANSFORM_H

#include "rows.h"

#if VL == 16
#define SWAPPED(a, h)                                                                                                     \
    __builtin_shufflevector(                                                                                              \
        a, a, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, 13 ^ h, 14 ^ h, \
        15 ^ h)
#elif VL == 8
#define SWAPPED(a, h) __builtin_shufflevector(a, a, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, 6 ^ h, 7 ^ h)
#else
#define SWAPPED(a, h) __builtin_shufflevector(a, a, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h)
#endif

/* Sums and differences of lanes that are `h`, a constant, apart. */
#define LANE_STEP(a, h)                                                                                                   \
    do {                                                                                                                  \
        vi sign;                                                                                                          \
        for (int lane = 0; lane < VL; lane++) sign[lane] = lane & (h) ? INT32_MIN : 0;                                    \
        a = SWAPPED(a, (h)) + (vf)((vi)a ^ sign);                                                                         \
    } while (0)

INLINE vf transform_lanes(vf a, int block) {
    (void)block; /* which has all lanes where they are four */
    LANE_STEP(a, 1);
    LANE_STEP(a, 2);
#if VL >= 8
    if (block >= 8) LANE_STEP(a, 4);
#endif
#if VL >= 16
    if (block >= 16) LANE_STEP(a, 8);
#endif
    return a;
}

/* Each block of y[k], in place; its elements are multiplied by the signs, if there are any, before or after. */
static void transform_row(const transform_t *t, const int inverse, float *y, int64_t k) {
    const int block = t->block;
    const vf unit = v_set((float)(1.0 / sqrt((double)block)));
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        vf a = v_load_part(y + i, n) * unit;
        if (t->signs && !inverse) a *= v_load_part(t->signs + i, n);
        v_store_part(y + i, transform_lanes(a, block), n);
    }
    for (int64_t at = 0; at < k && block > VL; at += block)
        for (int half = VL; half < block; half *= 2)
            for (int i = 0; i < block; i += 2 * half)
                for (float *p = y + at + i, *end = p + half; p < end; p += VL) {
                    const vf a = v_load(p), b = v_load(p + half);
                    v_store(p, a + b);
                    v_store(p + half, a - b);
                }
    for (int64_t i = 0; t->signs && inverse && i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        v_store_part(y + i, v_load_part(y + i, n) * v_load_part(t->signs + i, n), n);
    }
}

#endif
