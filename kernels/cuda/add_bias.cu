// Adds a bias to every row. One block per token.
extern "C" __global__ void add_bias(const int *step, float *x, const float *bias, int dim) {
    int m = blockIdx.x;
    if (m >= STEP_TOKENS(step)) return;
    float4 *row = (float4 *)(x + (size_t)m * dim);
    for (int k = threadIdx.x; k < dim / 4; k += WG) {
        float4 v = row[k], b = ((const float4 *)bias)[k];
        row[k] = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
    }
}
