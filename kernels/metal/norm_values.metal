// norm_tokens: RMSNorm (where NORM) of the rows of all tokens, in f32, added to `out` where ADD. Also what a transform takes.
// One threadgroup a token.
[[kernel, max_total_threads_per_threadgroup(WG)]] void norm_values(
    device const int *step [[buffer(0)]], device const float4 *x [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device float4 *out [[buffer(4)]], constant int &dim [[buffer(5)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    ulong row = ulong(m) * ulong(dim / 4);
    float squares = 0.0f;
    for (int k = place.item; NORM && k < dim / 4; k += WG) squares += dot(x[row + ulong(k)], x[row + ulong(k)]);
    float inverse = NORM ? 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(dim) + eps) : 1.0f;
    for (int k = place.item; k < dim / 4; k += WG) {
        float4 value = NORM ? x[row + ulong(k)] * inverse * weight[k] : x[row + ulong(k)];
#if ADD
        float4 before = out[row + ulong(k)];
        out[row + ulong(k)] = before + value;
#else
        out[row + ulong(k)] = value;
#endif
    }
}
