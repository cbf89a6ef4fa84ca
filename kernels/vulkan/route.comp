// The experts of each token: logits, then the greatest of them and their softmax.
BUFFER(0, readonly, int, step_data);
#if ENTRY_route_logits
layout(constant_id = 1) const int LANES = 16;
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, readonly, vec4, router);
BUFFER(4, writeonly, float, logits);
layout(push_constant) uniform Push { float eps; int dim, experts; };
shared float part[WG];

// Grid: [shares of the experts, tokens]. LANES invocations share an expert's row of the router; each adds in the same order, so that
// equal rows have equal logits. The norm is one factor of the whole row.
KERNEL(route_logits) {
    uint m = gl_WorkGroupID.y, item = LANE, quads = uint(dim) / 4, row = m * quads;
    uint e = gl_WorkGroupID.x * (WG / LANES) + item / LANES, from = min(e, uint(experts) - 1) * quads;
    if (m >= STEP_TOKENS) return;
    float squares = 0.0, sum = 0.0;
    for (uint k = item; k < quads; k += WG) squares += dot(x[row + k], x[row + k]);
    for (uint k = item % LANES; k < quads; k += LANES) sum += dot(x[row + k] * weight[k], router[from + k]);
    part[item] = sum;
    float inverse = 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(dim) + eps);  // its barriers publish `part`
    if (item % LANES == 0 && e < experts) {
        for (uint i = 1; i < LANES; i++) sum += part[item + i];
        logits[m * experts + e] = sum * inverse;
    }
}
#else
layout(constant_id = 2) const int EXPERTS = 1;
BUFFER(1, readonly, float, logits);
BUFFER(2, writeonly, int, ids);
BUFFER(3, , float, shares);
layout(push_constant) uniform Push { int top; };
#include "draw.glsl"
const uint TAKEN = 0, NOT_A_NUMBER = 0xFFFFFFFFu;  // the latter is above the key of any number, so that a share tells of it
shared uint keys[EXPERTS];
shared uvec2 best[WG];  // the greatest key, with the complement of its expert, which decides where keys are equal

uvec2 greater(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y > b.y) ? a : b; }

// e^z, 0 of -infinity, and not a number of what is none, which the built-in function need not keep.
float power_of(float z) { return no_number(z) ? uintBitsToFloat(0x7FC00000u) : z == -INFINITY ? 0.0 : exp(z); }

// One work-group a token. In each round the greatest key is taken; of equal ones, that of the lowest expert.
KERNEL(route_top) {
    uint m = gl_WorkGroupID.x, item = LANE, row = m * EXPERTS;
    if (m >= STEP_TOKENS) return;
    for (uint e = item; e < EXPERTS; e += WG) keys[e] = no_number(logits[row + e]) ? NOT_A_NUMBER : float_key(logits[row + e]);
    float first = 0.0, total = 0.0;
    for (uint j = 0; j < top; j++) {
        uvec2 mine = uvec2(TAKEN, 0);
        for (uint e = item; e < EXPERTS; e += WG) mine = greater(mine, uvec2(keys[e], ~e));
        barrier();
        best[item] = mine;
        for (uint half_size = WG / 2; half_size > 0; half_size /= 2) {
            barrier();
            if (item < half_size) best[item] = greater(best[item], best[item + half_size]);
        }
        barrier();
        uint chosen = ~best[0].y;
        if (chosen % WG == item) keys[chosen] = TAKEN;  // read again by this invocation only
        if (j == 0) first = logits[row + chosen];
        float power = power_of(logits[row + chosen] - first);
        total += power;
        if (item == 0) {
            ids[m * top + j] = int(chosen);
            shares[m * top + j] = power;
        }
    }
    if (item == 0)
        for (uint j = 0; j < top; j++) shares[m * top + j] /= total;
}
#endif
