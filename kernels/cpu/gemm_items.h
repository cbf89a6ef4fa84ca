/* The items of a product of many tokens: how its threads share them, by whichever ways the level has. */
#ifndef BN_GEMM_ITEMS_H
#define BN_GEMM_ITEMS_H

#include "gemm_lookup.h"

/* One panel by the tokens `begin` to `end`. */
typedef void multiply_item_t(gemm_t *gemm, place_t at, int64_t panel, int64_t begin, int64_t end);

/* Take items until none is left: those by look-up first, then panels by up to ITEM_TOKENS of the other tokens. */
INLINE void multiply_items(const run_t *run, gemm_t *gemm, int thread, multiply_item_t *multiply) {
    const ternary_matmul_op_t *o = gemm->o;
    const int64_t tokens = run->step.tokens, looks = any_unpacked(o) ? 0 : look_spans(run, o, tokens), look_total = look_items(run, o, looks);
    const int64_t spans = (tokens + ITEM_TOKENS - 1) / ITEM_TOKENS, items = items_in(o, spans);
    for (int64_t item; (item = pool_take(run->pool, thread, look_total + items)) >= 0;) {
        if (item < look_total) {
            look_item(run, gemm, looks, item, thread);
            continue;
        }
        const place_t at = place_of(o, spans, item - look_total);
        const int64_t panel = at.number / spans, looked = panel < look_panels(at.part) ? looks * LOOK_SPAN : 0;
        const int64_t first = at.number % spans * ITEM_TOKENS, begin = first < looked ? looked : first;
        const int64_t end = first + ITEM_TOKENS < tokens ? first + ITEM_TOKENS : tokens;
        if (begin < end) multiply(gemm, at, panel, begin, end);
    }
}

#endif
