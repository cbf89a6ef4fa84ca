// Adds a bias to every row. One work-group a token.
BUFFER(0, readonly, int, step_data);
BUFFER(1, , vec4, x);
BUFFER(2, readonly, vec4, bias);
layout(push_constant) uniform Push { int dim; };

KERNEL(add_bias) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4;
    if (m >= STEP_TOKENS) return;
    for (uint i = LANE; i < quads; i += WG) x[m * quads + i] += bias[i];
}
