// embed from a ternary table: out[m] = table[tokens[m]], for the rows that are bound. A work-group a token.
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uint, codes);
BUFFER(2, readonly, uint, w_scale);  // two f16 each
BUFFER(3, writeonly, vec4, result);
layout(push_constant) uniform Push { int tokens, first, rows; };
#include "table.glsl"

KERNEL(table_embed) {
    int m = int(gl_WorkGroupID.x);
    if (m >= STEP_TOKENS) return;
    int row = step_data[tokens + m] - first;
    if (row < 0 || row >= rows) return;
    for (uint i = LANE; i < QUADS; i += WG) result[m * QUADS + i] = weights_at(row, codes[row * ROW + i / 32 * 8 + i % 8], 4 * i);
}
