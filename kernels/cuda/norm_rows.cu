// RMSNorm of the rows that need logits. One block a row.
extern "C" __global__ void norm_rows(const int *step, int rows, const float *x, const float *weight, float eps, float *out,
                                     int dim) {
    int r = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)step[rows + r] * dim);
    float4 *to = (float4 *)(out + (size_t)r * dim);
    float inverse = inverse_rms(row, dim, eps);
#pragma unroll 4
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) to[i] = times(times(row[i], inverse), ((const float4 *)weight)[i]);
}
