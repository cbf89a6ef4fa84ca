// out[r, n] = x[r] . weight[n], f32 sums. A warp has a weight row; TOKENS rows of x share its read. Block: [32, ROWS].
extern "C" __global__ void dense_matmul(const int *step, const float *x, const weight_t *weight, float *out, int cols,
                                        int rows) {
    int n = blockIdx.x * ROWS + threadIdx.y, first = blockIdx.y * TOKENS;
    int count = STEP_ROWS(step);
    if (first >= count || n >= rows) return;
    float sums[TOKENS] = {};
    for (int k = threadIdx.x; k < cols; k += WARP) {
        float w = to_float(weight[(size_t)n * cols + k]);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sums[t] += w * x[(size_t)min(first + t, count - 1) * cols + k];
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        float sum = warp_reduce<Sum>(sums[t]);
        if (threadIdx.x == 0 && first + t < count) out[(size_t)(first + t) * rows + n] = sum;
    }
}
