// RMSNorm of the rows that need logits. One threadgroup a row.
[[kernel, max_total_threads_per_threadgroup(WG)]] void norm_rows(
    device const int *step [[buffer(0)]], constant int &rows [[buffer(1)]], device const float *x [[buffer(2)]],
    device const float *weight [[buffer(3)]], constant float &eps [[buffer(4)]], device float *out [[buffer(5)]],
    constant int &dim [[buffer(6)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int r = int(group.x);
    if (r >= STEP_ROWS(step)) return;
    device const float *row = x + ulong(step[rows + r]) * ulong(dim);
    float squares = 0.0f;
    for (int i = place.item; i < dim; i += WG) squares += row[i] * row[i];
    float inverse = 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(dim) + eps);
    for (int i = place.item; i < dim; i += WG) out[ulong(r) * ulong(dim) + ulong(i)] = row[i] * inverse * weight[i];
}
