// variants: SUBGROUPS
// Each row of x as two rows of f16, for dense_mma: scaled by the power of two that brings its greatest magnitude to 2^14 ... 2^15,
// rounded, and the remainder of the rounding. The loss is under 2^-22 of an element, or 2^-39 of the greatest.
layout(constant_id = 1) const int COLS = 8;  // a multiple of 8
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, writeonly, uvec4, split);
BUFFER(3, writeonly, float, undo);  // factor of a row's products

uvec4 halves_of(vec4 a, vec4 b) {
    return uvec4(half_pair(a.x, a.y), half_pair(a.z, a.w), half_pair(b.x, b.y), half_pair(b.z, b.w));
}

KERNEL(split_rows) {
    uint r = gl_WorkGroupID.x, row = r * (COLS / 4);
    if (r >= STEP_ROWS) return;
    float largest = 0.0;
    for (uint i = LANE; i < COLS / 4; i += WG) largest = max(largest, max4(abs(x[row + i])));
    largest = group_sum_max(0.0, largest).y;
    uint exponent = clamp(floatBitsToUint(largest) >> 23, 15u, 253u);  // zeros and infinities too
    float scale = uintBitsToFloat((254u - exponent) << 23) * 16384.0;
    for (uint i = LANE; i < COLS / 8; i += WG) {
        vec4 a = x[row + 2 * i] * scale, b = x[row + 2 * i + 1] * scale;
        uvec4 high = halves_of(a, b);
        a -= vec4(unpackHalf2x16(high.x), unpackHalf2x16(high.y));
        b -= vec4(unpackHalf2x16(high.z), unpackHalf2x16(high.w));
        split[r * (COLS / 4) + i] = high;
        split[r * (COLS / 4) + COLS / 8 + i] = halves_of(a, b);
    }
    if (LANE == 0) undo[r] = uintBitsToFloat(exponent << 23) / 16384.0;
}
