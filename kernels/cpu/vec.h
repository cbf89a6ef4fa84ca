/*
 * Vectors of floats as wide as the level's registers, in clang's vector extension: one source for every level.
 *
 * `VL` lanes are a register (16 with AVX-512, 8 with AVX2, 4 elsewhere). Nothing here rounds differently from level to
 * level except `v_fma`, which is two roundings where the processor has no fused instruction.
 */
#ifndef BN_VEC_H
#define BN_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((ext_vector_type(VL)));
typedef int32_t vi __attribute__((ext_vector_type(VL)));
typedef uint32_t vu __attribute__((ext_vector_type(VL)));
typedef double vd __attribute__((ext_vector_type(VL)));
typedef int8_t vb __attribute__((ext_vector_type(VL)));
typedef uint16_t vs __attribute__((ext_vector_type(VL)));

/* The same without any alignment, for memory. */
typedef float vf_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));
typedef int32_t vi_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));
typedef int8_t vb_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));
typedef uint16_t vs_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));

typedef uint16_t half_t; /* the bits of an IEEE half */

INLINE vf v_load(const float *p) { return *(const vf_mem *)p; }
INLINE void v_store(float *p, vf a) { *(vf_mem *)p = a; }
INLINE vf v_set(float a) { return (vf)(a); }
INLINE vf v_max(vf a, vf b) { return a > b ? a : b; }
INLINE vf v_min(vf a, vf b) { return a < b ? a : b; }
INLINE vf v_abs(vf a) { return (vf)((vi)a & 0x7fffffff); }

INLINE vf v_fma(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_elementwise_fma(a, b, c);
#else
    return a * b + c;
#endif
}

/* The first n <= VL elements, the rest zero. */
INLINE vf v_load_part(const float *p, int n) {
    if (n == VL) return v_load(p);
    vf a = (vf)(0.0f);
    memcpy(&a, p, (size_t)n * sizeof *p);
    return a;
}
INLINE void v_store_part(float *p, vf a, int n) {
    if (n == VL)
        v_store(p, a);
    else
        memcpy(p, &a, (size_t)n * sizeof *p);
}

INLINE float v_sum(vf a) {
    float lanes[VL];
    memcpy(lanes, &a, sizeof lanes);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE double v_sum_double(vd a) {
    double lanes[VL];
    memcpy(lanes, &a, sizeof lanes);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

INLINE float v_top(vf a) {
    float lanes[VL];
    memcpy(lanes, &a, sizeof lanes);
    for (int width = VL / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

/* Round half to even, for |a| < 2^22: the addition leaves no room for fraction bits. */
INLINE vf v_round(vf a) { return (a + 12582912.0f) - 12582912.0f; }

/* ---- half floats ---- */

#if defined(__F16C__) || defined(__aarch64__)

typedef _Float16 vh __attribute__((ext_vector_type(VL)));
INLINE vf v_from_half(vs h) { return __builtin_convertvector((vh)h, vf); }
INLINE vs v_to_half(vf a) { return (vs)__builtin_convertvector(a, vh); }

#else

INLINE vf v_from_half(vs h) {
    vu bits = __builtin_convertvector(h, vu);
    vf scaled = (vf)((bits & 0x7fffu) << 13) * v_set(0x1p112f); /* rebias the exponent; subnormals come out right */
    vu special = (vu)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (vf)((vu)scaled | special | (bits & 0x8000u) << 16);
}

INLINE vs v_to_half(vf a) {
    vu bits = (vu)a, sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    vu normal = (magnitude + 0xfffu + (magnitude >> 13 & 1) - 0x38000000u) >> 13; /* to nearest even */
    vu subnormal = (vu)((vf)magnitude + v_set(0.5f)) - 0x3f000000u; /* the adder rounds at the last place of 2^-24 */
    vu result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? (vu)(0x7c00u) : result; /* values that round to 65520 or more are infinite */
    result = magnitude > 0x7f800000u ? (vu)(0x7e00u) : result;
    return __builtin_convertvector(result | sign, vs);
}

#endif

INLINE vf v_load_half(const half_t *p) { return v_from_half(*(const vs_mem *)p); }
INLINE void v_store_half(half_t *p, vf a) { *(vs_mem *)p = v_to_half(a); }
INLINE vf v_load_half_part(const half_t *p, int n) {
    if (n == VL) return v_load_half(p);
    vs h = (vs)(0);
    memcpy(&h, p, (size_t)n * sizeof *p);
    return v_from_half(h);
}
INLINE void v_store_half_part(half_t *p, vf a, int n) {
    vs h = v_to_half(a);
    memcpy(p, &h, (size_t)n * sizeof *p);
}

INLINE vf v_load_codes(const int8_t *p) { return __builtin_convertvector(__builtin_convertvector(*(const vb_mem *)p, vi), vf); }

/* ---- elementary functions ---- */

/* e^a within 2e-7, relative; a is clamped to ±87, so that nothing overflows or becomes subnormal. */
INLINE vf v_exp(vf a) {
    a = v_min(v_max(a, v_set(-87.0f)), v_set(87.0f));
    vf n = v_round(a * v_set(1.44269504f));
    vf r = v_fma(n, v_set(-0.693359375f), a); /* ln 2 in two parts, the first exact in 9 bits */
    r = v_fma(n, v_set(2.12194440e-4f), r);
    /* Taylor's series to the seventh power: |r| <= ln 2 / 2, so what is left out is below 6e-9. */
    vf p = v_set(1.0f / 5040);
    p = v_fma(p, r, v_set(1.0f / 720));
    p = v_fma(p, r, v_set(1.0f / 120));
    p = v_fma(p, r, v_set(1.0f / 24));
    p = v_fma(p, r, v_set(1.0f / 6));
    p = v_fma(p, r, v_set(0.5f));
    p = v_fma(p, r, v_set(1.0f));
    p = v_fma(p, r, v_set(1.0f));
    return (vf)((vi)p + (__builtin_convertvector(n, vi) << 23));
}

/* ln a of positive normal numbers, with a small relative error also where a is near 1. */
INLINE vf v_log(vf a) {
    /* a = m 2^e with m in [√½, √2); f = m - 1 is exact, and ln m = 2 artanh(f / (2 + f)). */
    vi bits = (vi)a - 0x3f3504f3;
    vf e = __builtin_convertvector(bits >> 23, vf);
    vf f = (vf)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
    vf s = f / (f + 2.0f), z = s * s;
    vf p = v_set(2.0f / 11);
    p = v_fma(p, z, v_set(2.0f / 9));
    p = v_fma(p, z, v_set(2.0f / 7));
    p = v_fma(p, z, v_set(2.0f / 5));
    p = v_fma(p, z, v_set(2.0f / 3));
    /* ln(1 + f) = f - s (f - z p), so that f, which has no error, carries the result. */
    vf tail = v_fma(-z, p, f) * s;
    return v_fma(e, v_set(0.693359375f), f - v_fma(e, v_set(2.12194440e-4f), tail));
}

#endif
