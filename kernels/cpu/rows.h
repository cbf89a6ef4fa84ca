/*
 * What the norms and the quantisers share: a row of floats to RMSNorm and to absmax int8.
 *
 * All of it in f64: it costs little beside the products, squares of squared ReLU exceed f32's range, and a code next to a
 * rounding border then comes out as exact arithmetic has it, on every level alike.
 */
#ifndef BN_ROWS_H
#define BN_ROWS_H

typedef double vd_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));

INLINE vd v_wide(vf a) { return __builtin_convertvector(a, vd); }
INLINE vd v_abs_wide(vd a) { return a < 0.0 ? -a : a; }
INLINE vd v_max_wide(vd a, vd b) { return a > b ? a : b; }

INLINE double v_top_wide(vd a) {
    double top = a[0];
    for (int i = 1; i < VL; i++) top = a[i] > top ? a[i] : top;
    return top;
}

INLINE double inverse_rms(double sum_of_squares, int64_t k, float eps) {
    return 1.0 / sqrt(sum_of_squares / (double)k + (double)eps);
}

INLINE double sum_of_squares(const float *x, int64_t k) {
    vd sum = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const vd a = v_wide(v_load_part(x + i, k - i < VL ? (int)(k - i) : VL));
        sum += a * a;
    }
    return v_sum_double(sum);
}

/* y = x · inverse · weight of n <= VL elements. */
INLINE vd normal(const float *x, double inverse, const float *weight, int n) {
    return v_wide(v_load_part(x, n)) * inverse * v_wide(v_load_part(weight, n));
}

INLINE float greatest_magnitude(const float *x, int64_t k) {
    vf top = v_set(0.0f);
    int64_t i = 0;
    for (; i + VL <= k; i += VL) top = v_max(v_abs(v_load(x + i)), top);
    if (i < k) top = v_max(v_abs(v_load_part(x + i, (int)(k - i))), top);
    return v_top(top);
}

/* Absmax int8: the scale of a row whose greatest magnitude is `top`, and what its values are multiplied by. */
typedef struct {
    double factor;
    float scale;
} absmax_t;

INLINE absmax_t absmax_of(double top) {
    const double a = top > 1e-5 ? top : 1e-5;
    return (absmax_t){127.0 / a, (float)(a / 127.0)};
}

/* Codes of n <= VL values: half to even, as the addition leaves no room for fraction bits. */
INLINE void store_codes(int8_t *out, vd y, double factor, int n) {
    const double whole = 6755399441055744.0;
    vd q = y * factor + whole - whole;
    q = q > 127.0 ? (vd)(127.0) : q;
    q = q < -128.0 ? (vd)(-128.0) : q;
    const vb codes = __builtin_convertvector(__builtin_convertvector(q, vi), vb);
    if (n == VL)
        *(vb_mem *)out = codes;
    else
        memcpy(out, &codes, (size_t)n);
}

/* RMSNorm of x, where there is a weight, to codes; returns the scale. `squares` is the sum of x's, `y` scratch. */
INLINE float quantise_row(
    const float *x, double squares, const float *weight, float eps, double *y, int8_t *out, int64_t k) {
    const double inverse = inverse_rms(squares, k, eps);
    vd top = (vd)(0.0);
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        const vd a = weight ? normal(x + i, inverse, weight + i, n) : v_wide(v_load_part(x + i, n));
        *(vd_mem *)(y + i) = a;
        top = v_max_wide(v_abs_wide(a), top);
    }
    const absmax_t q = absmax_of(v_top_wide(top));
    for (int64_t i = 0; i < k; i += VL)
        store_codes(out + i, *(const vd_mem *)(y + i), q.factor, k - i < VL ? (int)(k - i) : VL);
    return q.scale;
}

#endif
