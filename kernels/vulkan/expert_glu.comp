// variants: SUBGROUPS
// act(gate) * up of a token's experts, whose rows stand side by side, with gates and values limited, RMSNorm (where NORM), then absmax
// int8 of each row. Grid: [experts of a token, tokens]. Limits let NaN through.
layout(constant_id = 1) const int NORM = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, gate_up);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, writeonly, uint, codes);
BUFFER(4, writeonly, float, scale);
layout(push_constant) uniform Push { float eps; int dim; float limit; };

#include "activation.glsl"

vec4 at_most(vec4 v, float most) { return mix(v, vec4(most), greaterThan(v, vec4(most))); }
vec4 value_of(vec4 gate, vec4 up) { return act(at_most(gate, limit)) * -at_most(-at_most(up, limit), limit); }

KERNEL(expert_glu) {
    uint quads = uint(dim) / 4, row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x, gates = 2 * row * quads;
    if (gl_WorkGroupID.y >= STEP_TOKENS) return;
    float squares = 0.0, largest = 0.0;
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = value_of(gate_up[gates + i], gate_up[gates + quads + i]);
        squares += dot(v, v);
        if (NORM != 0) v *= weight[i];
        largest = max(largest, max4(abs(v)));
    }
    vec2 found = group_sum_max(squares, largest);
    float inverse = NORM != 0 ? 1.0 / sqrt(found.x / float(dim) + eps) : 1.0;
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = value_of(gate_up[gates + i], gate_up[gates + quads + i]);
        if (NORM != 0) v *= weight[i];
        codes[row * quads + i] = quantised(v * factor);
    }
    if (LANE == 0) scale[row] = largest / 127.0;
}
