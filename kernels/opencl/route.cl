// The experts of each token: logits, then the greatest of them and their softmax.

// Grid: [shares of the experts, tokens]. LANES work-items share an expert's row of the router; each adds in the same order, so that
// equal rows have equal logits. The norm is one factor of the whole row.
kernel void route_logits(global const int *step, global const float4 *x, global const float4 *weight, float eps,
                         global const float4 *router, global float *logits, int dim, int experts) {
    local float2 scratch[WG];
    local float part[WG];
    int m = get_group_id(1), item = get_local_id(0), lane = item % LANES, e = get_group_id(0) * (WG / LANES) + item / LANES;
    int there = m < STEP_TOKENS(step), count = there ? dim / 4 : 0;  // not a return: see expert_matmul.cl
    global const float4 *row = x + (size_t)m * (dim / 4), *of = router + (size_t)min(e, experts - 1) * (dim / 4);
    float squares = 0.0f, sum = 0.0f;
    for (int k = item; k < count; k += WG) squares += dot(row[k], row[k]);
    for (int k = lane; k < count; k += LANES) sum += dot(row[k] * weight[k], of[k]);
    part[item] = sum;
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);  // its barriers publish `part`
    if (there && lane == 0 && e < experts) {
        for (int i = 1; i < LANES; i++) sum += part[item + i];
        logits[(size_t)m * experts + e] = sum * inverse;
    }
}

#define TAKEN 0u
#define NOT_A_NUMBER 0xffffffffu /* above the key of any number, so that a share tells of it */

// The greater of two keys, each with the complement of its expert, which decides where keys are equal.
inline uint2 greater(uint2 a, uint2 b) { return a.x > b.x || (a.x == b.x && a.y > b.y) ? a : b; }

// One work-group a token. In each round the greatest key is taken; of equal ones, that of the lowest expert.
kernel void route_top(global const int *step, global const float *logits, global int *ids, global float *shares, int top) {
    local uint2 best[WG];
    local uint key[EXPERTS];
    int m = get_group_id(0), item = get_local_id(0);
    int there = m < STEP_TOKENS(step), rounds = there ? top : 0;  // not a return: see expert_matmul.cl
    global const float *row = logits + (there ? (size_t)m * EXPERTS : 0);
    for (int e = item; e < EXPERTS; e += WG) key[e] = isnan(row[e]) ? NOT_A_NUMBER : float_key(row[e]);
    float first = 0.0f, total = 0.0f;
    for (int j = 0; j < rounds; j++) {
        uint2 mine = (uint2)(TAKEN, 0u);
        for (int e = item; e < EXPERTS; e += WG)
            mine = greater(mine, (uint2)(key[e], ~(uint)e));
        barrier(CLK_LOCAL_MEM_FENCE);
        best[item] = mine;
        for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            if (item < half_size) best[item] = greater(best[item], best[item + half_size]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        int chosen = (int)~best[0].y;
        if (chosen % WG == item) key[chosen] = TAKEN;  // read again by this work-item only
        if (j == 0) first = row[chosen];
        float power = exp(row[chosen] - first);
        total += power;
        if (item == 0) {
            ids[(size_t)m * top + j] = chosen;
            shares[(size_t)m * top + j] = power;
        }
    }
    if (there && item == 0)
        for (int j = 0; j < top; j++) shares[(size_t)m * top + j] /= total;
}
