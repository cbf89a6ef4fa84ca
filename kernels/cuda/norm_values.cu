// norm_tokens: RMSNorm (if NORM) of the rows of all tokens, in f32, added to `out` where ADD. Also what a transform takes where no kernel
// has both. One block a token.
extern "C" __global__ void norm_values(const int *step, const float *x, const float *weight, float eps, float *out, int dim) {
    int m = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)m * dim);
    float4 *to = (float4 *)(out + (size_t)m * dim);
#if NORM
    float inverse = inverse_rms(row, dim, eps);
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) {
        float4 v = times(times(row[i], inverse), ((const float4 *)weight)[i]);
#if ADD
        float4 old = to[i];
        v = make_float4(__fadd_rn(old.x, v.x), __fadd_rn(old.y, v.y), __fadd_rn(old.z, v.z), __fadd_rn(old.w, v.w));
#endif
        to[i] = v;
    }
#else
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) to[i] = row[i];
#endif
}
