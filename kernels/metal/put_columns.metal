// Puts the rows of a product into columns of a wider matrix, from `first` on, or adds them (where ADD). One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void put_columns(
    device const int *step [[buffer(0)]], device const float *product [[buffer(1)]], device float *out [[buffer(2)]],
    constant int &cols [[buffer(3)]], constant int &width [[buffer(4)]], constant int &first [[buffer(5)]], PLACE) {
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    for (int i = int(index); i < cols; i += WG) {
        ulong to = ulong(m) * ulong(width) + ulong(first + i);
        float value = product[ulong(m) * ulong(cols) + ulong(i)];
#if ADD
        float before = out[to];
        out[to] = before + value;
#else
        out[to] = value;
#endif
    }
}
