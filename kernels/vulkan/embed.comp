// out[m] = table[tokens[m]], where that row is among the `count` from `first` on that this part of the table has.
layout(constant_id = 1) const int WEIGHT_F16 = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uint, table);
BUFFER(2, writeonly, vec4, result);
layout(push_constant) uniform Push { int tokens, dim, first, count; };

KERNEL(embed) {
    int m = int(gl_WorkGroupID.x);
    if (m >= STEP_TOKENS) return;
    int row = step_data[tokens + m] - first;
    if (row < 0 || row >= count) return;
    uint quads = uint(dim) / 4, to = m * quads, from = row * quads;
    for (uint i = LANE; i < quads; i += WG) {
        if (WEIGHT_F16 != 0) {
            uint at = 2 * (from + i);
            result[to + i] = vec4(unpackHalf2x16(table[at]), unpackHalf2x16(table[at + 1]));
        } else {
            uint at = 4 * (from + i);
            result[to + i] = uintBitsToFloat(uvec4(table[at], table[at + 1], table[at + 2], table[at + 3]));
        }
    }
}
