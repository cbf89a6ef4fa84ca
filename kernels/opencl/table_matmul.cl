// dense_matmul of a ternary table with a scale for each GROUP of columns: out[r, n] = x[r] . ((codes[n] - 1) * w_scale[n]), f32 sums.
// LANES work-items share EACH rows of the table, TOKENS rows of x share their read. A word holds, at each bit pair, four
// neighbours of K: pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
#define SLOTS (WG / LANES)

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void table_matmul(
    global const int *step, global const float *x, global const uint *codes, global const half *w_scale, global float *out,
    int rows) {
    local float parts[SLOTS][EACH][TOKENS][LANES];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES;
    int first_row = get_group_id(0) * SLOTS * EACH, first = get_group_id(1) * TOKENS, count = STEP_ROWS(step);
    int last = first < count ? ROW_BYTES / 4 : 0;  // not a return: PoCL 3.1 lets all work-items into the last condition then
    float sums[EACH][TOKENS];
    UNROLL
    for (int e = 0; e < EACH; e++) {
        UNROLL
        for (int t = 0; t < TOKENS; t++) sums[e][t] = 0.0f;
    }
    for (int i = lane; i < last; i += LANES) {
        uint word[EACH];
        UNROLL
        for (int e = 0; e < EACH; e++)
            word[e] = codes[(size_t)min(first_row + slot * EACH + e, rows - 1) * (ROW_BYTES / 4) + i];
        UNROLL
        for (int pair = 0; pair < 4; pair++) {
            int k = i / 8 * 128 + pair * 32 + i % 8 * 4;
            if (k >= COLS) break;
            float4 w[EACH];
            UNROLL
            for (int e = 0; e < EACH; e++) {
                size_t n = min(first_row + slot * EACH + e, rows - 1);
                float4 weights = convert_float4(as_uchar4(word[e] >> (6 - 2 * pair) & 0x03030303u)) - 1.0f;
                w[e] = weights * vload_half(n * (COLS / GROUP) + k / GROUP, w_scale);
            }
            UNROLL
            for (int t = 0; t < TOKENS; t++) {
                float4 v = *(global const float4 *)(x + (size_t)min(first + t, count - 1) * COLS + k);
                UNROLL
                for (int e = 0; e < EACH; e++) sums[e][t] += dot(w[e], v);
            }
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
