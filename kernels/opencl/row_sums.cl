// The sum of each row of int8 activations that norm_quant has not computed; a product with codes w + 1 subtracts it.
// A work-group a row.
kernel void row_sums(global const int *step, global const char *x, global int *sums) {
    local float2 scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    int sum = 0;
    for (int k = lane; k < COLS / 4; k += WG) sum = dot4(0x01010101u, ((global const uint *)(x + (size_t)m * COLS))[k], sum);
    float total = group_sum((float)sum, scratch);  // exact: below 2^24, as are its parts
    if (lane == 0) sums[m] = (int)total;
}
