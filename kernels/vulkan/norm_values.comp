// variants: SUBGROUPS ADD
// norm_tokens: RMSNorm (where NORM) of the rows of all tokens, in f32, added to `result` where ADD. Also what a transform takes.
// One work-group a token.
layout(constant_id = 1) const int NORM = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, weight);
#if ADD
BUFFER(3, , vec4, result);
#else
BUFFER(3, writeonly, vec4, result);
#endif
layout(push_constant) uniform Push { float eps; int dim; };

KERNEL(norm_values) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4, row = m * quads;
    if (m >= STEP_TOKENS) return;
    float inverse = 1.0;
    if (NORM != 0) {
        float squares = 0.0;
        for (uint i = LANE; i < quads; i += WG) squares += dot(x[row + i], x[row + i]);
        inverse = 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(dim) + eps);
    }
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = x[row + i] * inverse;
        if (NORM != 0) v *= weight[i];
#if ADD
        precise vec4 sum = result[row + i] + v;
        result[row + i] = sum;
#else
        result[row + i] = v;
#endif
    }
}
