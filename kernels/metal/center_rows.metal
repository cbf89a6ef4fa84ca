// Subtracts its mean from every row. One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void center_rows(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device float *out [[buffer(2)]],
    constant int &dim [[buffer(3)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device const float *row = x + ulong(m) * ulong(dim);
    float sum = 0.0f;
    for (int i = place.item; i < dim; i += WG) sum += row[i];
    float mean = group_sum(sum, scratch, place) / float(dim);
    for (int i = place.item; i < dim; i += WG) out[ulong(m) * ulong(dim) + ulong(i)] = row[i] - mean;
}
