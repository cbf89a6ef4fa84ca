// norm_tokens: RMSNorm (where NORM) of the rows of all tokens, in f32, added to `out` where ADD. Also what a transform takes.
// One work-group a token.
#if ADD
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds the sum separately
#endif
kernel void norm_values(global const int *step, global const float4 *x, global const float4 *weight, float eps, global float4 *out,
                        int dim) {
    int m = get_group_id(0), lane = get_local_id(0);
    int there = m < STEP_TOKENS(step);  // not a return: see norm_rows.cl
    size_t row = there ? (size_t)m * (dim / 4) : 0;
#if NORM
    local float2 scratch[WG];
    float squares = 0.0f;
    for (int k = lane; k < dim / 4; k += WG) squares += dot(x[row + k], x[row + k]);
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);
    if (!there) return;
    for (int k = lane; k < dim / 4; k += WG) {
        float4 v = x[row + k] * inverse * weight[k];
#if ADD
        v = out[row + k] + v;
#endif
        out[row + k] = v;
    }
#else
    if (!there) return;
    for (int k = lane; k < dim / 4; k += WG) out[row + k] = x[row + k];
#endif
}
