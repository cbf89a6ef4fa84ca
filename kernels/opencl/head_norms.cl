// RMSNorm of each head of q and of k in place, before they are rotated. One work-group per token and head (q heads, k heads); WG divides DIM.
kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void head_norms(
    global const int *step, global float *qkv, global const float *q_norm, global const float *k_norm, float eps, int heads,
    int kv_heads) {
    local float2 scratch[WG];
    int item = get_local_id(0), m = get_group_id(0), head = get_group_id(1);
    if (m >= STEP_TOKENS(step)) return;
    global float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    global const float *norm = head < heads ? q_norm : k_norm;
    float squares = 0.0f;
    for (int i = 0; i < DIM / WG; i++) squares += row[i * WG + item] * row[i * WG + item];
    float root = sqrt(group_sum(squares, scratch) / DIM + eps);
    for (int i = 0; i < DIM / WG; i++) row[i * WG + item] = row[i * WG + item] * norm[i * WG + item] / root;
}
