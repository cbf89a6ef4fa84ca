// variants: DOT WIDE
// ternary_matmul of weights with a scale for each group of columns, for a few tokens. LANES invocations share HELD rows of W. Each takes a unit of
// columns at a time (a block of 128, or a group of more), and puts the terms of its groups into shared memory, where they are
// added up. A word of codes holds, at each bit pair, four neighbours: pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
#include "ternary_group.glsl"
layout(constant_id = 6) const int LANES = 16;
layout(constant_id = 7) const int HELD = 2;
layout(constant_id = 8) const int TOKENS = 1;
layout(constant_id = 9) const int PITCH = 17;  // of a row's terms in shared memory: COUNT at least
const uint UNITS = (COUNT + EACH - 1) / EACH;
const uint SLOTS = WG / LANES, ROWS = SLOTS * HELD;
shared float terms[ROWS * TOKENS * PITCH];

// For one token, codes stay where they are in their bytes, but those of the top bit pair, which would not be signed bytes: the sum is
// shifted once, and the activations' sum taken off, as codes are w + 1. For more tokens, signed weights save the activations' sums.
int place_of(int plane) { return plane == 0 ? 4 : 6 - 2 * plane; }
uvec4 operand(uvec4 quad, int plane) {
    if (TOKENS > 1) return plane_of(quad, plane);
    return (plane == 0 ? quad >> 2 : quad) & (0x03030303u << place_of(plane));
}

KERNEL(ternary_groups) {
    uint item = LANE, slot = item / LANES, tokens = STEP_TOKENS;
    uint n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS, m0 = gl_WorkGroupID.z * TOKENS;
    if (m0 >= tokens || n0 >= rows) return;
    for (uint i = 0; i < (UNITS + LANES - 1) / LANES; i++) {
        uint unit = i * LANES + item % LANES;
        if (unit >= UNITS) break;
        int found[HELD * TOKENS * 4], total[4];  // of a plane, token t and row r: at (r TOKENS + t) 4 + plane
        [[unroll]] for (int f = 0; f < HELD * TOKENS * 4; f++) found[f] = 0;
        [[unroll]] for (int plane = 0; plane < 4; plane++) total[plane] = 0;
        for (uint b = 0; b < BLOCKS; b++) {
            uint block = unit * BLOCKS + b;
            uvec4 low[HELD], high[HELD];
            [[unroll]] for (int r = 0; r < HELD; r++) {
                uint at = min(n0 + slot * HELD + r, rows - 1) * ROW + 2 * block;
                low[r] = codes[at];
                high[r] = codes[at + 1];
            }
            [[unroll]] for (int plane = 0; plane < 4; plane++) {
                uvec4 w[HELD], u[HELD];
                [[unroll]] for (int r = 0; r < HELD; r++) {
                    w[r] = operand(low[r], plane);
                    u[r] = operand(high[r], plane);
                }
                [[unroll]] for (int t = 0; t < TOKENS; t++) {
                    uint m = min(m0 + t, tokens - 1), at = block * 8 + 2 * plane;
                    uvec4 v = load_x(m, at), y = load_x(m, at + 1);
                    if (TOKENS == 1) total[plane] = dot16(uvec4(0x01010101u), y, dot16(uvec4(0x01010101u), v, total[plane]));
                    [[unroll]] for (int r = 0; r < HELD; r++) {
                        int f = (r * TOKENS + t) * 4 + plane;
                        found[f] = dot16(u[r], y, dot16(w[r], v, found[f]));
                    }
                }
            }
        }
        [[unroll]] for (int r = 0; r < HELD; r++)
            [[unroll]] for (int j = 0; j < EACH; j++) {
                uint n = slot * HELD + r, s = unit * EACH + j;
                if (s < COUNT)
                    [[unroll]] for (int t = 0; t < TOKENS; t++) {
                        int sum = 0;
                        [[unroll]] for (int p = 0; p < PLANES; p++) {
                            int plane = j * PLANES + p, part = found[(r * TOKENS + t) * 4 + plane];
                            sum += TOKENS == 1 ? (part >> place_of(plane)) - total[plane] : part;
                        }
                        terms[(n * TOKENS + t) * PITCH + s] = term(sum, min(n0 + n, rows - 1), s);
                    }
            }
    }
    barrier();
    for (uint i = item; i < ROWS * TOKENS; i += WG) {
        uint m = m0 + i % TOKENS, n = n0 + i / TOKENS;
        if (m >= tokens || n >= rows) continue;
        precise float sum = 0.0;
        for (uint s = 0; s < COUNT; s++) sum += terms[i * PITCH + s];
        store(m, n, sum);
    }
}
