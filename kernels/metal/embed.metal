// out[m] = table[tokens[m]]. One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void embed(
    device const int *step [[buffer(0)]], constant int &tokens [[buffer(1)]], device const WEIGHT *table [[buffer(2)]],
    device float *out [[buffer(3)]], constant int &dim [[buffer(4)]], PLACE) {
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    ulong row = ulong(step[tokens + m]) * ulong(dim);
    for (int i = int(index); i < dim; i += WG) out[ulong(m) * ulong(dim) + ulong(i)] = float(table[row + ulong(i)]);
}
