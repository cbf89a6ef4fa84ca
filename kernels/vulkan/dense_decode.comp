// requires: SUBGROUPS
// dense_matmul of f16 weights for one row of x, of which every invocation keeps its share, up to 16 times 8 columns. A subgroup
// takes TURNS rows of the weight, one after the other.
#include "dense.glsl"
layout(constant_id = 1) const int COLS = 8;  // a multiple of 8
layout(constant_id = 2) const int LANES = 32;
layout(constant_id = 3) const int TURNS = 1;
layout(constant_id = 4) const int GATE = 2;  // a word, 0 where there is nothing to do: the step's rows, or a flag of the compact head
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, uvec4, weight);
BUFFER(3, writeonly, float, result);
BUFFER(4, readonly, uint, gate);
layout(push_constant) uniform Push { int rows, first_row, all_rows; };
const int QUADS = COLS / 8, EACH = (QUADS + LANES - 1) / LANES;

KERNEL(dense_decode) {
    if (gate[GATE] == 0) return;
    uint lane = gl_SubgroupInvocationID, from = (gl_WorkGroupID.x * (WG / LANES) + gl_SubgroupID) * TURNS;
    vec4 low[16], high[16];
#define HOLD(i) if (i < EACH) { \
        uint k = lane + i * LANES; \
        low[i] = k < QUADS ? x[2 * k] : vec4(0.0); \
        high[i] = k < QUADS ? x[2 * k + 1] : vec4(0.0); \
    }
    REPEAT_16(HOLD)
    for (uint n = from; n < min(from + TURNS, rows); n++) {
        uvec4 words[16];
        float sum = 0.0;
#define FETCH(i) if (i < EACH) words[i] = weight[n * QUADS + min(lane + i * LANES, QUADS - 1)];
#define MULTIPLY(i) if (i < EACH) \
        sum = add_products(sum, low[i], high[i], halves(words[i].x, words[i].y), halves(words[i].z, words[i].w));
        REPEAT_16(FETCH)
        REPEAT_16(MULTIPLY)
        sum = sum_of_lanes(sum, LANES);
        if (lane == 0) result[first_row + n] = sum;
    }
}
