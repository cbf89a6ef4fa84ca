// Rows that a transform or a quantisation takes, as f32: each head of x, after RMSNorm where NORM, times silu (where SILU) or the sigmoid of
// its gate. One work-group a head of a token. UNTILE: the number of key heads, if value heads are put from the tiled order into the other.
kernel void gated_values(global const int *step, global const float *x, global const float *gate, global const float *weight, float eps,
                         global float *out, int dim) {
    local float2 scratch[WG];
    int h = get_group_id(0), m = get_group_id(1), lane = get_local_id(0), to = h;
    int there = m < STEP_TOKENS(step), size = dim / (int)get_num_groups(0);  // not a return: see norm_rows.cl; not HEAD: PoCL 3.1 then crashes, too
    size_t row = there ? (size_t)m * dim : 0, head = row + (size_t)h * size;
    float factor = 1.0f;
#if NORM
    float squares = 0.0f;
    for (int i = lane; i < size; i += WG) squares += x[head + i] * x[head + i];
    factor = 1.0f / sqrt(group_sum(squares, scratch) / size + eps);
#endif
    if (UNTILE) to = h % max(UNTILE, 1) * (get_num_groups(0) / max(UNTILE, 1)) + h / max(UNTILE, 1);
    if (!there) return;
    for (int i = lane; i < size; i += WG) {
        float value = x[head + i] * factor, g = gate[head + i];
#if NORM
        value *= weight[i];
#endif
        out[row + (size_t)to * size + i] = value * (SILU ? silu(g) : sigmoid(g));
    }
}
