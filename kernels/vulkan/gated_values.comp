// variants: SUBGROUPS
// Rows that a transform or a quantisation takes, as f32: each head of x, after RMSNorm where NORM, times silu (where SILU) or the sigmoid of
// its gate. One work-group a head of a token. UNTILE: the number of key heads, if value heads are put from the tiled order into the other.
layout(constant_id = 1) const int HEAD = 128;
layout(constant_id = 2) const int NORM = 0;
layout(constant_id = 3) const int SILU = 0;
layout(constant_id = 4) const int UNTILE = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, x);
BUFFER(2, readonly, float, gate);
BUFFER(3, readonly, float, weight);
BUFFER(4, writeonly, float, result);
layout(push_constant) uniform Push { float eps; int dim; };

KERNEL(gated_values) {
    uint h = gl_WorkGroupID.x, m = gl_WorkGroupID.y, row = m * uint(dim), head = row + h * HEAD, to = h;
    if (m >= STEP_TOKENS) return;
    float factor = 1.0;
    if (NORM != 0) {
        float squares = 0.0;
        for (uint i = LANE; i < HEAD; i += WG) squares += x[head + i] * x[head + i];
        factor = 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(HEAD) + eps);
    }
    if (UNTILE != 0) to = h % UNTILE * (gl_NumWorkGroups.x / UNTILE) + h / UNTILE;
    for (uint i = LANE; i < HEAD; i += WG) {
        float value = x[head + i] * factor, g = gate[head + i];
        if (NORM != 0) value *= weight[i];
        result[row + to * HEAD + i] = value * (SILU != 0 ? g : 1.0) / (1.0 + exp(-g));
    }
}
