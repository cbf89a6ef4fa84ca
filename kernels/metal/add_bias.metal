// Adds a bias to every row. One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void add_bias(
    device const int *step [[buffer(0)]], device float *x [[buffer(1)]], device const float *bias [[buffer(2)]],
    constant int &dim [[buffer(3)]], PLACE) {
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device float *row = x + ulong(m) * ulong(dim);
    for (int i = place.item; i < dim; i += WG) row[i] += bias[i];
}
