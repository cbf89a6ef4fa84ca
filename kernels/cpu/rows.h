/*
 * Shared by the norms and the quantisers: RMSNorm and absmax int8 of a row of floats.
 *
 * All in f64: squares of squared ReLU exceed f32's range, and a code next to a rounding border then comes out as in exact
 * arithmetic, on every level alike. RMSNorm is one factor of a row, so one pass finds both the sum of squares and the
 * greatest magnitude, and another one stores the codes.
 */
#ifndef BN_ROWS_H
#define BN_ROWS_H

typedef double vd_mem __attribute__((ext_vector_type(VL), aligned(1), may_alias));
typedef int64_t vl __attribute__((ext_vector_type(VL)));

INLINE vd v_wide(vf a) { return __builtin_convertvector(a, vd); }
INLINE vd v_abs_wide(vd a) { return (vd)((vl)a & INT64_MAX); }
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

/* to = RMSNorm(x), rounded once. */
INLINE void norm_floats(const float *x, const float *weight, float eps, float *to, int64_t k) {
    const double inverse = inverse_rms(sum_of_squares(x, k), k, eps);
    for (int64_t i = 0; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        const vd a = v_wide(v_load_part(x + i, n)) * inverse * v_wide(v_load_part(weight + i, n));
        v_store_part(to + i, __builtin_convertvector(a, vf), n);
    }
}

INLINE vf v_sigmoid(vf a) { return 1.0f / (1.0f + v_exp(-a)); }

INLINE float greatest_magnitude(const float *x, int64_t k) {
    vf top = v_set(0.0f);
    int64_t i = 0;
    for (; i + VL <= k; i += VL) top = v_max(v_abs(v_load(x + i)), top);
    if (i < k) top = v_max(v_abs(v_load_part(x + i, (int)(k - i))), top);
    return v_top(top);
}

/* Whether any element is NaN. */
INLINE bool any_nan(const float *z, int64_t n) {
    vi odd = (vi)(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const vf a = v_load(z + i);
        odd |= a != a;
    }
    bool found = false;
    for (; i < n; i++) found |= z[i] != z[i];
    for (int j = 0; j < VL; j++) found |= odd[j] != 0;
    return found;
}

/* Running state of a row: the squares of its values, and the greatest magnitudes of the values that quantise_row gets. */
typedef struct {
    vd squares, top;
} seen_t;

/* Keep n <= VL values, multiplied by the norm's weight where there is one. */
INLINE void see(seen_t *seen, vd a, const float *weight, double *y, int n) {
    seen->squares += a * a;
    if (weight) a *= v_wide(v_load_part(weight, n));
    *(vd_mem *)y = a;
    seen->top = v_max_wide(v_abs_wide(a), seen->top);
}

/* Codes of the row of k values that has been seen, after RMSNorm where `normed`; returns the scale. */
INLINE float quantise_row(seen_t seen, const double *y, const int normed, float eps, int8_t *out, int64_t k) {
    const double inverse = normed ? inverse_rms(v_sum_double(seen.squares), k, eps) : 1.0;
    const double greatest = v_top_wide(seen.top) * inverse, top = greatest > 1e-5 ? greatest : 1e-5;
    const double factor = 127.0 / top * inverse;
    /* Half to even: the addition leaves no room for fraction bits, and a result of at most 127 is the sum's lowest byte. */
    const double whole = 6755399441055744.0;
    for (int64_t i = 0; i < k; i += VL) {
        const vb codes = __builtin_convertvector((vl)(*(const vd_mem *)(y + i) * factor + whole), vb);
        if (k - i >= VL)
            *(vb_mem *)(out + i) = codes;
        else
            memcpy(out + i, &codes, (size_t)(k - i));
    }
    return (float)(top / 127.0);
}

#endif
