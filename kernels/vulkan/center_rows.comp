// variants: SUBGROUPS
// Subtracts its mean from every row. One work-group a token.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, writeonly, vec4, result);
layout(push_constant) uniform Push { int dim; };

KERNEL(center_rows) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4, row = m * quads;
    if (m >= STEP_TOKENS) return;
    float sum = 0.0;
    for (uint i = LANE; i < quads; i += WG) sum += x[row + i].x + x[row + i].y + (x[row + i].z + x[row + i].w);
    float mean = group_sum_max(sum, 0.0).x / float(dim);
    for (uint i = LANE; i < quads; i += WG) result[row + i] = x[row + i] - mean;
}
