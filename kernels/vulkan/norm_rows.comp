// variants: SUBGROUPS
// RMSNorm of the rows that need logits. One work-group a row.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, writeonly, vec4, result);
layout(push_constant) uniform Push { int rows; float eps; int dim; };

KERNEL(norm_rows) {
    uint r = gl_WorkGroupID.x, quads = uint(dim) / 4;
    if (r >= STEP_ROWS) return;
    uint from = uint(step_data[rows + r]) * quads;
    float squares = 0.0;
    for (uint i = LANE; i < quads; i += WG) squares += dot(x[from + i], x[from + i]);
    float inverse = 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(dim) + eps);
    for (uint i = LANE; i < quads; i += WG) result[r * quads + i] = x[from + i] * inverse * weight[i];
}
