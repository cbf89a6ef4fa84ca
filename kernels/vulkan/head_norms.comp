// RMSNorm of each head of q and of k in place, before they are rotated. One work-group per token and head (q heads, k heads); WG divides DIM.
layout(constant_id = 1) const int DIM = 64;
BUFFER(0, readonly, int, step_data);
BUFFER(1, , float, qkv);
BUFFER(2, readonly, float, q_norm);
BUFFER(3, readonly, float, k_norm);
layout(push_constant) uniform Push { float eps; int heads, kv_heads; };

KERNEL(head_norms) {
    uint m = gl_WorkGroupID.x, head = gl_WorkGroupID.y;
    if (m >= STEP_TOKENS) return;
    uint row = (m * uint(heads + 2 * kv_heads) + head) * DIM;
    float squares = 0.0;
    for (uint i = LANE; i < DIM; i += WG) squares += qkv[row + i] * qkv[row + i];
    float root = sqrt(group_sum_max(squares, 0.0).x / float(DIM) + eps);
    for (uint i = LANE; i < DIM; i += WG) qkv[row + i] = qkv[row + i] * (head < heads ? q_norm[i] : k_norm[i]) / root;
}
