// Decays and strengths of the delta rule, from the norm of a row and two small products. One threadgroup a head of a token. The norm is
// one factor of the whole row, so all three sums are found together.
[[kernel, max_total_threads_per_threadgroup(WG)]] void delta_gates(
    device const int *step [[buffer(0)]], device const float4 *x [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device const float4 *alpha [[buffer(4)]], device const float4 *beta [[buffer(5)]],
    device const float *bias [[buffer(6)]], device const float *rate [[buffer(7)]], device float *out [[buffer(8)]],
    constant int &dim [[buffer(9)]], constant int &heads [[buffer(10)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int h = int(group.x), m = int(group.y);
    if (m >= STEP_TOKENS(step)) return;
    ulong row = ulong(m) * ulong(dim / 4), own = ulong(h) * ulong(dim / 4);
    float squares = 0.0f, decay = 0.0f, strength = 0.0f;
    for (int k = place.item; k < dim / 4; k += WG) {
        float4 v = x[row + ulong(k)], y = v * weight[k];
        squares += dot(v, v);
        decay += dot(y, alpha[own + ulong(k)]);
        strength += dot(y, beta[own + ulong(k)]);
    }
    float inverse = 1.0f / precise::sqrt(group_sum(squares, scratch, place) / float(dim) + eps);
    decay = group_sum(decay, scratch, place) * inverse + bias[h];
    strength = group_sum(strength, scratch, place) * inverse;
    if (place.item == 0) {
        ulong at = ulong(m) * 2 * ulong(heads) + ulong(h);
        out[at] = rate[h] * (fmax(decay, 0.0f) + precise::log(1.0f + precise::exp(-fabs(decay))));
        out[at + ulong(heads)] = sigmoid(strength);
    }
}
