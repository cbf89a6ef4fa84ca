/*
 * route: the experts of the greatest logits of each token, and the softmax over these.
 *
 * Logits are float products of the normalised row and the router's rows, a few tokens for each row that is read. A logit is
 * summed in the same order whatever the number of tokens, so equal rows have equal logits, and no token depends on others.
 */
#include "rows.h"

#define ROUTE_TOKENS 4
#define ROUTE_EXPERTS 32 /* of an item of work where there are few tokens */

INLINE int64_t route_row(int64_t columns) { return (int64_t)aligned_bytes((size_t)columns, sizeof(float)) / 4; }

static need_t route_need(const run_t *run, const op_t *op) {
    const route_op_t *o = &op->route;
    return (need_t){
        .shared = aligned_bytes((size_t)run->program.limits.max_tokens * (size_t)o->experts, sizeof(float)),
        .scratch = ROUTE_TOKENS * (size_t)route_row(o->x.columns) * sizeof(float),
    };
}

/* to[t · pitch] = row · y[t], each of `tokens`, which is a constant. */
INLINE void route_dots(const float *row, const float *y, int64_t stride, int64_t k, const int tokens, float *to, int64_t pitch) {
    vf sum[ROUTE_TOKENS][2];
    for (int t = 0; t < tokens; t++) sum[t][0] = sum[t][1] = v_set(0.0f);
    int64_t i = 0;
    for (; i + 2 * VL <= k; i += 2 * VL)
        for (int t = 0; t < tokens; t++) {
            sum[t][0] = v_fma(v_load(row + i), v_load(y + t * stride + i), sum[t][0]);
            sum[t][1] = v_fma(v_load(row + i + VL), v_load(y + t * stride + i + VL), sum[t][1]);
        }
    for (; i < k; i += VL) {
        const int n = k - i < VL ? (int)(k - i) : VL;
        for (int t = 0; t < tokens; t++)
            sum[t][0] = v_fma(v_load_part(row + i, n), v_load_part(y + t * stride + i, n), sum[t][0]);
    }
    for (int t = 0; t < tokens; t++) to[t * pitch] = v_sum(sum[t][0] + sum[t][1]);
}

/* The logits of `tokens` tokens from `first` on for the experts begin … end - 1; y is scratch. */
static void route_logits(
    const route_op_t *o, int64_t first, int tokens, int64_t begin, int64_t end, float *y, float *logits) {
    const int64_t k = o->x.columns, stride = route_row(k);
    for (int t = 0; t < tokens; t++)
        norm_floats((const float *)o->x.data + (first + t) * o->x.stride, o->weight, o->eps, y + t * stride, k);
    for (int64_t e = begin; e < end; e++) {
        const float *row = o->router + e * k;
        float *to = logits + first * o->experts + e;
        switch (tokens) {
        case 1: route_dots(row, y, stride, k, 1, to, o->experts); break;
        case 2: route_dots(row, y, stride, k, 2, to, o->experts); break;
        case 3: route_dots(row, y, stride, k, 3, to, o->experts); break;
        default: route_dots(row, y, stride, k, ROUTE_TOKENS, to, o->experts);
        }
    }
}

/* One token's experts and shares. The logits of those chosen become minus infinity. */
static void route_choose(float *logits, int32_t experts, int32_t top, int32_t *ids, float *shares) {
    float unsound = 0.0f; /* a NaN where any logit is not finite */
    for (int32_t e = 0; e < experts; e++) unsound += logits[e] * 0.0f;
    double sum = 0;
    for (int32_t j = 0; j < top; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < experts; e++) {
            bool taken = false;
            if (!(logits[e] > -INFINITY)) /* chosen before, or not a number */
                for (int32_t i = 0; i < j; i++) taken |= ids[i] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        ids[j] = best;
        shares[j] = logits[best];
        logits[best] = -INFINITY;
    }
    const float greatest = shares[0];
    for (int32_t j = 0; j < top; j++) {
        shares[j] = v_exp(v_set(shares[j] - greatest))[0];
        sum += shares[j];
    }
    for (int32_t j = 0; j < top; j++) shares[j] = (float)(shares[j] / sum) + unsound;
}

static void route(run_t *run, const op_t *op, int thread) {
    const route_op_t *o = &op->route;
    const int64_t tokens = run->step.tokens, blocks = (tokens + ROUTE_TOKENS - 1) / ROUTE_TOKENS;
    const int64_t part = tokens <= 4 * ROUTE_TOKENS ? ROUTE_EXPERTS : o->experts;
    const int64_t parts = (o->experts + part - 1) / part;
    float *logits = (float *)run->shared, *y = (float *)(run->scratch + (size_t)thread * run->scratch_bytes);
    for (int64_t item; (item = pool_take(run->pool, thread, blocks * parts)) >= 0;) {
        const int64_t first = item / parts * ROUTE_TOKENS, begin = item % parts * part;
        const int64_t end = begin + part < o->experts ? begin + part : o->experts;
        route_logits(o, first, tokens - first < ROUTE_TOKENS ? (int)(tokens - first) : ROUTE_TOKENS, begin, end, y, logits);
    }
    pool_barrier(run->pool, thread);
    for (int64_t m; (m = pool_take(run->pool, thread, tokens)) >= 0;)
        route_choose(
            logits + m * o->experts, o->experts, o->ids.columns, (int32_t *)o->ids.data + m * o->ids.stride,
            (float *)o->shares.data + m * o->shares.stride);
}
