// `sums` of norm_quant, of int8 activations that another kernel has made. A warp a row.
extern "C" __global__ void row_sums(const int *step, const signed char *x, int *sums) {
    start_dependents();
    wait_for_before();
    if (blockIdx.x >= STEP_TOKENS(step)) return;
    int sum = 0;
    for (int k = threadIdx.x; k < COLS / 4; k += WARP) sum = add_to_row(((const int *)(x + (size_t)blockIdx.x * COLS))[k], sum);
    sum = row_of_warp(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
