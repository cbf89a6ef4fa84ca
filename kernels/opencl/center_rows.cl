// Subtracts its mean from every row. One work-group a token.
kernel void center_rows(global const int *step, global const float *x, global float *out, int dim) {
    local float2 scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float4 *row = (global const float4 *)(x + (size_t)m * dim);
    float sum = 0.0f;
    for (int k = lane; k < dim / 4; k += WG) sum += row[k].x + row[k].y + (row[k].z + row[k].w);
    float mean = group_sum(sum, scratch) / dim;
    for (int k = lane; k < dim / 4; k += WG) ((global float4 *)(out + (size_t)m * dim))[k] = row[k] - mean;
}
