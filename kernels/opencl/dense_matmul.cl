// out[r, n] = x[r] . weight[n], f32 sums. LANES work-items share EACH weight rows, TOKENS rows of x share their read.
#define SLOTS (WG / LANES)

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
    UNROLL
    for (int e = 0; e < EACH; e++) {
        UNROLL
        for (int t = 0; t < TOKENS; t++) parts[slot][e][t][lane] = sums[e][t];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < SLOTS * EACH * TOKENS; i += WG) {
        int to_row = first_row + i / TOKENS, to = first + i % TOKENS;
        if (to_row < rows && to < count) {
            float sum = 0.0f;
            for (int l = 0; l < LANES; l++) sum += parts[i / TOKENS / EACH][i / TOKENS % EACH][i % TOKENS][l];
            out[(size_t)to * rows + to_row] = sum;
        }
    }
}
