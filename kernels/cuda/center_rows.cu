// Subtracts its mean from every row. One block per token.
extern "C" __global__ void center_rows(const int *step, const float *x, float *out, int dim) {
    int m = blockIdx.x;
    if (m >= STEP_TOKENS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)m * dim);
    float sum = 0.0f;
    for (int k = threadIdx.x; k < dim / 4; k += WG) sum += row[k].x + row[k].y + (row[k].z + row[k].w);
    float mean = block_reduce<Sum>(sum) / dim;
    for (int k = threadIdx.x; k < dim / 4; k += WG) {
        float4 v = row[k];
        ((float4 *)(out + (size_t)m * dim))[k] = make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean);
    }
}
