// variants: SUBGROUPS
// RMSNorm (where NORM), then absmax int8. One work-group a token. RMSNorm is one factor of a row, so the greatest
// magnitude and the mean square are found in one pass.
layout(constant_id = 1) const int NORM = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, writeonly, uint, codes);
BUFFER(4, writeonly, float, scale);
layout(push_constant) uniform Push { float eps; int dim; };

KERNEL(norm_quant) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4, row = m * quads;
    if (m >= STEP_TOKENS) return;
    float squares = 0.0, largest = 0.0;
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = x[row + i];
        squares += dot(v, v);
        if (NORM != 0) v *= weight[i];
        largest = max(largest, max4(abs(v)));
    }
    vec2 found = group_sum_max(squares, largest);
    float inverse = NORM != 0 ? 1.0 / sqrt(found.x / float(dim) + eps) : 1.0;
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = x[row + i];
        if (NORM != 0) v *= weight[i];
        codes[row + i] = quantised(v * factor);
    }
    if (LANE == 0) scale[m] = largest / 127.0;
}
