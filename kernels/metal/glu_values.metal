// Rows that a transform takes, as f32: act(gate) * up. One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void glu_values(
    device const int *step [[buffer(0)]], device const float *gate_up [[buffer(1)]], device float *out [[buffer(2)]],
    constant int &dim [[buffer(3)]], PLACE) {
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device const float *gate = gate_up + ulong(m) * 2 * ulong(dim);
    for (int i = int(index); i < dim; i += WG) out[ulong(m) * ulong(dim) + ulong(i)] = act(gate[i]) * gate[dim + i];
}
