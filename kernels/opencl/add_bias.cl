// Adds a bias to every row. One work-group a token.
kernel void add_bias(global const int *step, global float *x, global const float4 *bias, int dim) {
    int m = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global float4 *row = (global float4 *)(x + (size_t)m * dim);
    for (int k = get_local_id(0); k < dim / 4; k += WG) row[k] += bias[k];
}
