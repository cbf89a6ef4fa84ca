// variants: SUBGROUPS WIDE
// out[r, first + n] = x[r] . weight[n], f32 sums, for the `rows` rows of this part of the weight. LANES invocations share a
// row, TOKENS rows of x share its read. Eight columns at a time where WIDE (COLS is a multiple of 8), else four.
#include "dense.glsl"
layout(constant_id = 1) const int COLS = 8;
layout(constant_id = 2) const int LANES = 4;
layout(constant_id = 3) const int TOKENS = 1;
layout(constant_id = 4) const int WEIGHT_F16 = 0;
layout(constant_id = 5) const int GATE = 2;  // as dense_decode has it
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
#if WIDE
BUFFER(2, readonly, uvec4, weight);
#else
BUFFER(2, readonly, uint, weight);
#endif
BUFFER(3, writeonly, float, result);
BUFFER(4, readonly, uint, gate);
layout(push_constant) uniform Push { int rows, first_row, all_rows; };
#if !SUBGROUPS
shared float partial[TOKENS * WG];
#endif

KERNEL(dense_matmul) {
    uint lane = LANE, part = lane % LANES, n = gl_WorkGroupID.x * (WG / LANES) + lane / LANES;
    uint first = gl_WorkGroupID.y * TOKENS, count = STEP_ROWS;
    if (first >= count || gate[GATE] == 0) return;
    float sums[TOKENS];
    for (int t = 0; t < TOKENS; t++) sums[t] = 0.0;
    uint row = min(n, rows - 1);
#if WIDE
    uint from = row * (COLS / 8);
    for (uint k = part; k < COLS / 8; k += LANES) {
        vec4 a, b;
        if (WEIGHT_F16 != 0) {
            uvec4 word = weight[from + k];
            a = halves(word.x, word.y);
            b = halves(word.z, word.w);
        } else {
            a = uintBitsToFloat(weight[2 * (from + k)]);
            b = uintBitsToFloat(weight[2 * (from + k) + 1]);
        }
        for (uint t = 0; t < TOKENS; t++) {
            uint at = min(first + t, count - 1) * (COLS / 4) + 2 * k;
            sums[t] = add_products(sums[t], x[at], x[at + 1], a, b);
        }
    }
#else
    for (uint k = part; k < COLS / 4; k += LANES) {
        uint at = row * (COLS / 4) + k;
        vec4 a = WEIGHT_F16 != 0
            ? halves(weight[2 * at], weight[2 * at + 1])
            : uintBitsToFloat(uvec4(weight[4 * at], weight[4 * at + 1], weight[4 * at + 2], weight[4 * at + 3]));
        for (uint t = 0; t < TOKENS; t++) sums[t] += dot(a, x[min(first + t, count - 1) * (COLS / 4) + k]);
    }
#endif
#if SUBGROUPS
    for (int t = 0; t < TOKENS; t++) {
        float sum = sum_of_lanes(sums[t], LANES);
        if (part == t % LANES && n < rows && first + t < count) result[(first + t) * all_rows + first_row + n] = sum;
    }
#else
    for (int t = 0; t < TOKENS; t++) partial[t * WG + lane] = sums[t];
    barrier();
    for (uint t = part; t < TOKENS; t += LANES) {
        float sum = 0.0;
        for (uint i = 0; i < LANES; i++) sum += partial[t * WG + lane - part + i];
        if (n < rows && first + t < count) result[(first + t) * all_rows + first_row + n] = sum;
    }
#endif
}
