/*
 * ternary_matmul of weights that are all -1 or +1, in one bit each, with a scale for each group of columns. It adds the
 * products of groups as group_matmul.h does, so the result has the same bits.
 */
#include "group_matmul.h"

#ifdef ONE_BIT

static need_t binary_matmul_need(const run_t *run, const op_t *op) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    const size_t m = (size_t)run->program.limits.max_tokens, k = (size_t)o->x.columns;
    return (need_t){.shared = aligned_bytes(m, k) + aligned_bytes(m * (k / (size_t)o->group), sizeof(int32_t))};
}

INLINE void binary_item(gemm_t *gemm, place_t at, int64_t panel, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += BLOCK_TOKENS)
        group_block(gemm, at, panel, first, end - first < BLOCK_TOKENS ? (int)(end - first) : BLOCK_TOKENS, true);
}

static void binary_matmul(run_t *run, const op_t *op, int thread) {
    const ternary_matmul_op_t *o = &op->ternary_matmul;
    group_product(run, o, o->x.columns / 4, thread, binary_item);
}

#endif
