// RMSNorm (if NORM) of the rows of all tokens, in f32: what a transform takes where no kernel has both. One block a token.
extern "C" __global__ void norm_values(const int *step, const float *x, const float *weight, float eps, float *out, int dim) {
    int m = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)m * dim);
    float4 *to = (float4 *)(out + (size_t)m * dim);
#if NORM
    float inverse = inverse_rms(row, dim, eps);
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) to[i] = times(times(row[i], inverse), ((const float4 *)weight)[i]);
#else
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) to[i] = row[i];
#endif
}
