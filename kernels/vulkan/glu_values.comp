// Rows that a transform takes, as f32: act(gate) * up. One work-group a token.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, gate_up);
BUFFER(2, writeonly, vec4, result);
layout(push_constant) uniform Push { int dim; };
#include "activation.glsl"

KERNEL(glu_values) {
    uint m = gl_WorkGroupID.x, quads = uint(dim) / 4;
    if (m >= STEP_TOKENS) return;
    for (uint i = LANE; i < quads; i += WG)
        result[m * quads + i] = act(gate_up[2 * m * quads + i]) * gate_up[(2 * m + 1) * quads + i];
}
