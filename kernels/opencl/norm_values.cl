// Rows that a transform takes, as f32: x after RMSNorm where NORM. One work-group a token.
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
    for (int k = lane; k < dim / 4; k += WG) out[row + k] = x[row + k] * inverse * weight[k];
#else
    if (!there) return;
    for (int k = lane; k < dim / 4; k += WG) out[row + k] = x[row + k];
#endif
}
