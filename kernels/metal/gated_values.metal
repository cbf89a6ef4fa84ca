// Rows that a transform or a quantisation takes, as f32: each head of x, after RMSNorm where NORM, times silu (where SILU) or the sigmoid of
// its gate. One threadgroup a head of a token. UNTILE: the number of key heads, if value heads are put from the tiled order into the other.
[[kernel, max_total_threads_per_threadgroup(WG)]] void gated_values(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device const float *gate [[buffer(2)]],
    device const float *weight [[buffer(3)]], constant float &eps [[buffer(4)]], device float *out [[buffer(5)]],
    constant int &dim [[buffer(6)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int h = int(group.x), m = int(group.y);
    if (m >= STEP_TOKENS(step)) return;
    int to = UNTILE ? h % max(UNTILE, 1) * (dim / HEAD / max(UNTILE, 1)) + h / max(UNTILE, 1) : h;
    ulong row = ulong(m) * ulong(dim), head = row + ulong(h) * HEAD;
    float squares = 0.0f;
    for (int i = place.item; NORM && i < HEAD; i += WG) squares += x[head + ulong(i)] * x[head + ulong(i)];
    float factor = NORM ? 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(HEAD) + eps) : 1.0f;
    for (int i = place.item; i < HEAD; i += WG) {
        float value = x[head + ulong(i)] * factor, g = gate[head + ulong(i)];
        if (NORM) value *= weight[i];
        out[row + ulong(to) * HEAD + ulong(i)] = value * (SILU ? silu(g) : sigmoid(g));
    }
}
