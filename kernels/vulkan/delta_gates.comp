// variants: SUBGROUPS
// Decays and strengths of the delta rule, from the norm of a row and two small products. One work-group a head of a token. The norm is
// one factor of the whole row, so all three sums are found together.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, readonly, vec4, alpha);
BUFFER(4, readonly, vec4, beta);
BUFFER(5, readonly, float, bias);
BUFFER(6, readonly, float, rate);
BUFFER(7, writeonly, float, result);
layout(push_constant) uniform Push { float eps; int dim, heads; };

KERNEL(delta_gates) {
    uint h = gl_WorkGroupID.x, m = gl_WorkGroupID.y, quads = uint(dim) / 4;
    if (m >= STEP_TOKENS) return;
    float squares = 0.0, decay = 0.0, strength = 0.0;
    for (uint i = LANE; i < quads; i += WG) {
        vec4 v = x[m * quads + i], y = v * weight[i];
        squares += dot(v, v);
        decay += dot(y, alpha[h * quads + i]);
        strength += dot(y, beta[h * quads + i]);
    }
    float inverse = 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(dim) + eps);
    decay = group_sum_max(decay, 0.0).x * inverse + bias[h];
    strength = group_sum_max(strength, 0.0).x * inverse;
    if (LANE == 0) {
        result[m * 2 * heads + h] = rate[h] * (max(decay, 0.0) + log(1.0 + exp(-abs(decay))));
        result[m * 2 * heads + heads + h] = 1.0 / (1.0 + exp(-strength));
    }
}
