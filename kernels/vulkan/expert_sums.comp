// Grid: [columns, tokens]. The results of a token's experts times their shares, added in the order of the router, then to `sums`.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, results);
BUFFER(2, readonly, float, shares);
BUFFER(3, , float, sums);
layout(push_constant) uniform Push { int top, columns; };
#include "zero.glsl"

KERNEL(expert_sums) {
    uint n = gl_WorkGroupID.x * WG + LANE, m = gl_WorkGroupID.y;
    if (n >= columns || m >= STEP_TOKENS) return;
    precise float sum = 0.0;
    for (uint j = 0; j < top; j++) sum += results[(m * top + j) * columns + n] * shares[m * top + j];
    precise float added = sums[m * columns + n] + sum_from_zero(sum);
    sums[m * columns + n] = added;
}
