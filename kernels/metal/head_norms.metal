// RMSNorm of each head of q and of k in place, before they are rotated. One threadgroup per token and head (q heads, k heads), of at
// most a simdgroup; WG divides DIM.
[[kernel, max_total_threads_per_threadgroup(WG)]] void head_norms(
    device const int *step [[buffer(0)]], device float *qkv [[buffer(1)]], device const float *q_norm [[buffer(2)]],
    device const float *k_norm [[buffer(3)]], constant float &eps [[buffer(4)]], constant int &heads [[buffer(5)]],
    constant int &kv_heads [[buffer(6)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x), head = int(group.y);
    if (m >= STEP_TOKENS(step)) return;
    device float *row = qkv + (ulong(m) * ulong(heads + 2 * kv_heads) + ulong(head)) * DIM;
    device const float *norm = head < heads ? q_norm : k_norm;
    float v[DIM / WG], squares = 0.0f;
    for (int i = 0; i < DIM / WG; i++) {
        v[i] = row[i * WG + place.item];
        squares += v[i] * v[i];
    }
    float root = precise::sqrt(group_sum(squares, scratch, place) / float(DIM) + eps);
    for (int i = 0; i < DIM / WG; i++) row[i * WG + place.item] = v[i] * norm[i * WG + place.item] / root;
}
