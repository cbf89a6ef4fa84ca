/*
 * Shared by the products of many tokens (gemm_dot.h, gemm_amx.h, gemm_lookup.h): an operation's state, and the storing
 * of results.
 */
#ifndef BN_GEMM_H
#define BN_GEMM_H

#include "gemm_amx.h"
#include "gemm_dot.h"

/* What an operation's items share: the activations side by side, where they are, and their sums. */
typedef struct {
    const ternary_matmul_op_t *o;
    int32_t *x, *totals;
    bool matrix; /* by matrix_pass, which takes the activations as they lie */
    matrix_registers_t registers;
} gemm_t;

/* Rows of acc to out, for one token: codes are weight + 1, so what `total` more there is is taken off. */
INLINE void finish(const int32_t *acc, int32_t total, float scale, float *out, int64_t rows, int add) {
    for (int64_t i = 0; i < rows; i += VL) {
        const int n = rows - i < VL ? (int)(rows - i) : VL;
        vf a = __builtin_convertvector(*(const vi_mem *)(acc + i) - total, vf) * scale;
        if (add) a = v_load_part(out + i, n) + a;
        v_store_part(out + i, a, n);
    }
}

#endif
