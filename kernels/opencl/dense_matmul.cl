// out[r, n] = x[r] . weight[n], f32 sums.
#include "row_products.clh"

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void dense_matmul(
    global const int *step, global const float *x, global const WEIGHT *weight, global float *out, int cols, int rows) {
    local float parts[SLOTS][EACH][TOKENS][LANES];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES;
    int first_row = get_group_id(0) * SLOTS * EACH, first = get_group_id(1) * TOKENS, count = STEP_ROWS(step);
    int last = first < count ? cols : 0;  // not a return: PoCL 3.1 lets all work-items into the last condition then
    float sums[EACH][TOKENS];
    UNROLL
    for (int e = 0; e < EACH; e++) {
        UNROLL
        for (int t = 0; t < TOKENS; t++) sums[e][t] = 0.0f;
    }
    for (int k = 4 * lane; k < last; k += 4 * LANES) {
        float4 w[EACH];
        UNROLL
        for (int e = 0; e < EACH; e++) w[e] = LOAD_WEIGHT4(weight, (size_t)min(first_row + slot * EACH + e, rows - 1) * cols + k);
        UNROLL
        for (int t = 0; t < TOKENS; t++) {
            float4 v = *(global const float4 *)(x + (size_t)min(first + t, count - 1) * cols + k);
            UNROLL
            for (int e = 0; e < EACH; e++) sums[e][t] += dot(w[e], v);
        }
    }
    put_products(parts, sums, first_row, first, rows, count, out);
}
