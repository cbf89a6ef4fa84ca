// variants: SUBGROUPS
// act(gate) * up, RMSNorm (where NORM), absmax int8. One work-group a token; the products wait in `products`.
layout(constant_id = 1) const int NORM = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, gate_up);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, writeonly, uint, codes);
BUFFER(4, writeonly, float, scale);
BUFFER(5, , vec4, products);
layout(push_constant) uniform Push { float eps; int dim; };

#include "activation.glsl"

KERNEL(glu_norm_quant) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4, row = m * quads;
    if (m >= STEP_TOKENS) return;
    float squares = 0.0, largest = 0.0;
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = act(gate_up[2 * row + i]) * gate_up[2 * row + quads + i];
        squares += dot(v, v);
        if (NORM != 0) v *= weight[i];
        products[row + i] = v;  // read again only by this invocation
        largest = max(largest, max4(abs(v)));
    }
    vec2 found = group_sum_max(squares, largest);
    float inverse = NORM != 0 ? 1.0 / sqrt(found.x / float(dim) + eps) : 1.0;
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    for (uint i = LANE; i < quads; i += WG) codes[row + i] = quantised(products[row + i] * factor);
    if (LANE == 0) scale[m] = largest / 127.0;
}
