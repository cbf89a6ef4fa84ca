// The results of a token's experts times their shares, added in the router's order, then to `out`. Grid: [columns, tokens].
extern "C" __global__ void __launch_bounds__(WG)
expert_sums(const int *step, const float *results, const float *shares, float *out, int top, int columns) {
    int n = blockIdx.x * WG + threadIdx.x, m = blockIdx.y;
    start_dependents();
    wait_for_before();
    if (n >= columns || m >= STEP_TOKENS(step)) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int j = 0; j < top; j++) {
        size_t pair = (size_t)m * top + j;
        sum = __fadd_rn(sum, __fmul_rn(results[pair * columns + n], shares[pair]));
    }
    float *to = out + (size_t)m * columns + n;
    *to = __fadd_rn(*to, sum);
}
