// RMSNorm of the rows that need logits. One work-group a row.
kernel void norm_rows(global const int *step, int rows, global const float *x, global const float *weight, float eps,
                      global float *out, int dim) {
    local float2 scratch[WG];
    int r = get_group_id(0), lane = get_local_id(0);
    int there = r < STEP_ROWS(step);  // not a return: PoCL 3.1 compiles one here to code that crashes
    global const float *row = x + (there ? (size_t)step[rows + r] * dim : 0);
    float squares = 0.0f;
    for (int i = lane; i < dim; i += WG) squares += row[i] * row[i];
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);
    if (!there) return;
    for (int i = lane; i < dim; i += WG) out[(size_t)r * dim + i] = row[i] * inverse * weight[i];
}
