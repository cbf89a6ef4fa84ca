// out[r, n] = x[r] . weight[n], f32 sums. LANES work-items share a weight row, TOKENS rows of x share its read.
#define LANES 32

kernel void dense_matmul(global const int *step, global const float *x, global const WEIGHT *weight, global float *out,
                         int cols, int rows) {
    local float scratch[ROWS][TOKENS][LANES];
    int lane = get_local_id(0), group_row = get_local_id(1);
    int n = get_group_id(0) * ROWS + group_row, first = get_group_id(1) * TOKENS;
    int count = STEP_ROWS(step);
    if (first >= count) return;
    float sums[TOKENS];
    for (int t = 0; t < TOKENS; t++) sums[t] = 0.0f;
    size_t row = (size_t)min(n, rows - 1) * cols;
    for (int k = lane; k < cols; k += LANES) {
        float w = LOAD_WEIGHT(weight, row + k);
        for (int t = 0; t < TOKENS; t++) sums[t] += w * x[(size_t)min(first + t, count - 1) * cols + k];
    }
    for (int t = 0; t < TOKENS; t++) scratch[group_row][t][lane] = sums[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    // Not a condition on get_local_id(1): PoCL 3.1 takes that for uniform behind a barrier.
    int item = group_row * LANES + lane, to_row = get_group_id(0) * ROWS + item / TOKENS, to = first + item % TOKENS;
    if (item < ROWS * TOKENS && to_row < rows && to < count) {
        float sum = 0.0f;
        for (int i = 0; i < LANES; i++) sum += scratch[item / TOKENS][item % TOKENS][i];
        out[(size_t)to * rows + to_row] = sum;
    }
}
