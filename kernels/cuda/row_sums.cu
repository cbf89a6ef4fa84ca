// The sum of each row of int8 activations that norm_quant has not computed; a product with codes w + 1 subtracts it. A warp a row.
extern "C" __global__ void row_sums(const int *step, const signed char *x, int *sums) {
    start_dependents();
    wait_for_before();
    if (blockIdx.x >= STEP_TOKENS(step)) return;
    int sum = 0;
    for (int k = threadIdx.x; k < COLS / 4; k += WARP) sum = dot_ones(((const int *)(x + (size_t)blockIdx.x * COLS))[k], sum);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
