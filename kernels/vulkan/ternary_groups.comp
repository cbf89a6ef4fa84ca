// variants: DOT WIDE
// ternary_matmul of weights with a scale for each group of columns, for a few tokens. LANES invocations share HELD rows of W. Each takes a unit of
// columns at a time (a block of 128, or a group of more), and puts the terms of its groups into shared memory, where they are
// added up. A word of codes holds, at each bit pair, four neighbours: pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
#include "ternary_group.glsl"
layout(constant_id = 7) const int LANES = 16;
layout(constant_id = 8) const int HELD = 2;
layout(constant_id = 9) const int TOKENS = 1;
layout(constant_id = 10) const int PITCH = 17;  // of a row's terms in shared memory: COUNT and SUMS at least
const uint UNITS = (COUNT + EACH - 1) / EACH;
const uint SLOTS = WG / LANES, ROWS = SLOTS * HELD;
shared float terms[ROWS * TOKENS * PITCH];

KERNEL(ternary_groups) {
    uint item = LANE, slot = item / LANES, tokens = STEP_TOKENS;
    uint n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS, m0 = gl_WorkGroupID.z * TOKENS;
    if (m0 >= tokens || n0 >= rows) return;
    for (uint unit = item % LANES; unit < UNITS; unit += LANES) {
        int found[HELD * TOKENS * EACH];  // of group j, token t and row r: at (r TOKENS + t) EACH + j
        [[unroll]] for (int i = 0; i < HELD * TOKENS * EACH; i++) found[i] = 0;
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
                    w[r] = plane_of(low[r], plane);
                    u[r] = plane_of(high[r], plane);
                }
                [[unroll]] for (int t = 0; t < TOKENS; t++) {
                    uint m = min(m0 + t, tokens - 1), at = block * 8 + 2 * plane;
                    uvec4 v = load_x(m, at), y = load_x(m, at + 1);
                    [[unroll]] for (int r = 0; r < HELD; r++) {
                        int i = (r * TOKENS + t) * EACH + plane * EACH / 4;
                        found[i] = dot16(u[r], y, dot16(w[r], v, found[i]));
                    }
                }
            }
        }
        [[unroll]] for (int r = 0; r < HELD; r++)
            [[unroll]] for (int j = 0; j < EACH; j++) {
                uint n = slot * HELD + r, s = unit * EACH + j;
                if (s < COUNT)
                    [[unroll]] for (int t = 0; t < TOKENS; t++)
                        terms[(n * TOKENS + t) * PITCH + s] = term(found[(r * TOKENS + t) * EACH + j], min(n0 + n, rows - 1), s);
            }
    }
    barrier();
    for (uint i = item; i < ROWS * TOKENS * SUMS; i += WG) {  // a partial sum each, which takes the place of its first term
        uint from = i / SUMS * PITCH, p = i % SUMS;
        precise float sum = 0.0;
        for (uint s = p; s < COUNT; s += SUMS) sum += terms[from + s];
        terms[from + p] = sum;
    }
    barrier();
    for (uint i = item; i < ROWS * TOKENS; i += WG) {
        uint from = i * PITCH, m = m0 + i % TOKENS, n = n0 + i / TOKENS;
        if (m >= tokens || n >= rows) continue;
        for (uint part = SUMS / 2; part > 0; part /= 2)
            for (uint p = 0; p < part; p++) {
                precise float sum = terms[from + p] + terms[from + part + p];
                terms[from + p] = sum;
            }
        store(m, n, terms[from]);
    }
}
