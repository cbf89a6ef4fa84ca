// What both products of weights with a scale for each GROUP of columns share. The sums of a group are exact, and their terms are added in
// the order that the contract states, so that the result has its bits.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int ADD = 0;
layout(constant_id = 3) const int GROUP = 128;
layout(constant_id = 4) const int EACH = 1;  // groups of a block of 128 columns; 1 where a group has one or more blocks
layout(constant_id = 5) const int PLANES = 4;  // bit pairs of a block that are one group's
BUFFER(0, readonly, int, step_data);
#if WIDE
BUFFER(1, readonly, uvec4, x);  // COLS is a multiple of 16
#else
BUFFER(1, readonly, uint, x);
#endif
BUFFER(2, readonly, float, scale);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, uint, w_scale);  // two f16 each
BUFFER(5, , float, result);
layout(push_constant) uniform Push { int rows, first, total; };  // rows of W that are bound, the first of them, and all
const uint COUNT = COLS / GROUP;            // groups of a row
const uint BLOCKS = (GROUP + 127) / 128;  // blocks that a group has a part of
const uint ROW = (COLS + 127) / 128 * 2;   // vectors of codes of a row

#include "ternary_planes.glsl"
#include "zero.glsl"

// The term of a group: its sum times the scale of row n's group s.
float term(int sum, uint n, uint s) {
    uint at = (first + n) * COUNT + s;
    vec2 pair = unpackHalf2x16(w_scale[at / 2]);
    precise float value = float(sum) * (at % 2 == 0 ? pair.x : pair.y);
    return value;
}

void store(uint m, uint n, float sum) {
    uint at = m * total + first + n;
    precise float value = sum_from_zero(sum) * scale[m];
    if (ADD != 0) {
        precise float added = result[at] + value;
        value = added;
    }
    result[at] = value;
}
