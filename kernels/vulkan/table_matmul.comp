// dense_matmul of a ternary table: out[r, n] = x[r] . table[n] with f32 sums, for the rows that are bound: `rows` of `total`. LANES
// invocations share EACH of them, and TOKENS rows of x share a read of the table.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, uint, codes);
BUFFER(3, readonly, uint, w_scale);  // two f16 each
BUFFER(4, writeonly, float, result);
layout(push_constant) uniform Push { int rows, first, total; };
#include "table.glsl"
layout(constant_id = 4) const int LANES = 16;
layout(constant_id = 5) const int EACH = 2;
layout(constant_id = 6) const int TOKENS = 1;
const uint SUMS = EACH * TOKENS, ROWS = WG / LANES * EACH;
shared float parts[WG * SUMS];

KERNEL(table_matmul) {
    uint item = LANE, count = STEP_ROWS, t0 = gl_WorkGroupID.z * TOKENS;
    uint n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS, own = n0 + item / LANES * EACH;
    if (t0 >= count || n0 >= rows) return;
    float sums[SUMS];
    [[unroll]] for (int s = 0; s < SUMS; s++) sums[s] = 0.0;
    for (uint i = item % LANES; i < ROW; i += LANES) {
        uint words[EACH];
        [[unroll]] for (int e = 0; e < EACH; e++) words[e] = codes[min(own + e, rows - 1) * ROW + i];
        [[unroll]] for (int plane = 0; plane < 4; plane++) {
            uint k = i / 8 * 128 + plane * 32 + i % 8 * 4;
            if (k >= COLS) break;
            vec4 w[EACH];
            [[unroll]] for (int e = 0; e < EACH; e++) w[e] = weights_at(min(own + e, rows - 1), words[e], k);
            [[unroll]] for (int t = 0; t < TOKENS; t++) {
                vec4 v = x[min(t0 + t, count - 1) * QUADS + k / 4];
                [[unroll]] for (int e = 0; e < EACH; e++) sums[e * TOKENS + t] += dot(w[e], v);
            }
        }
    }
    [[unroll]] for (int s = 0; s < SUMS; s++) parts[item * SUMS + s] = sums[s];
    barrier();
    for (uint i = item; i < ROWS * TOKENS; i += WG) {
        uint n = n0 + i / TOKENS, t = t0 + i % TOKENS;
        if (n >= rows || t >= count) continue;
        float sum = 0.0;
        for (uint l = 0; l < LANES; l++) sum += parts[(i / SUMS * LANES + l) * SUMS + i % SUMS];
        result[t * total + first + n] = sum;
    }
}
