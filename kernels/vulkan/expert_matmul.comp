// variants: DOT WIDE
// Products of rows with the matrices of the experts that they are routed to. A pair is a token and one of its experts.
//
// A work-group has ROWS rows of one expert's matrices and up to TOKENS pairs of that expert: one, or those of a tile of expert_tiles.
// LANES invocations share a row; each takes blocks of 128 columns, and adds its integer sums to those of the groups of columns, in any
// order, as they are exact.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int GROUP = 128;  // columns of a scale; COLS where a matrix has one
layout(constant_id = 3) const int EACH = 1;     // groups of a block of 128 columns; 1 where a group has one or more blocks
layout(constant_id = 4) const int LANES = 16;
layout(constant_id = 5) const int TOKENS = 1;
layout(constant_id = 6) const int SCALED = 0;  // w_scale has two f16 a word, one for each group; otherwise f32, one a row
layout(constant_id = 7) const int GROUPED = 0;  // pairs are in the order of expert_tiles; otherwise `chosen` has the expert of each
BUFFER(0, readonly, int, step_data);
#if WIDE
BUFFER(1, readonly, uvec4, x);  // COLS is a multiple of 16
#else
BUFFER(1, readonly, uint, x);
#endif
BUFFER(2, readonly, float, scale);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, uint, w_scale);
BUFFER(5, writeonly, float, result);
BUFFER(6, readonly, int, chosen);
BUFFER(7, readonly, int, tiles);
// `per`: pairs that share a row of x and its scale. An expert has `rows` rows of each of `parts` matrices, whose results begin at `first`
// of a pair's `columns`. `begin_row` and `bound_rows`: the rows of all experts' matrices that are bound.
layout(push_constant) uniform Push { int top, per, experts, rows, parts, first, columns, begin_row, bound_rows; };
const uint COUNT = COLS / GROUP, BLOCKS = (COLS + 127) / 128, ROWS = WG / LANES;
const int PLANES = 4 / EACH;  // bit pairs of a block that are one group's
shared int sums[ROWS * TOKENS * COUNT];
#include "ternary_planes.glsl"
#include "zero.glsl"

// The stacked matrices' row for column n of an expert's result.
uint matrix_row(uint n, uint expert) { return (n / rows * experts + expert) * rows + n % rows; }

// The value of a row's integer sums, from `at` on: the terms of its groups, one after another, or one product.
float value_of(uint at, uint row, float unit) {
    if (SCALED == 0) {
        precise float factor = unit * uintBitsToFloat(w_scale[row]);
        precise float value = float(sums[at]) * factor;
        return value;
    }
    precise float sum = 0.0;
    for (uint s = 0; s < COUNT; s++) {
        uint place = row * COUNT + s;
        vec2 pair = unpackHalf2x16(w_scale[place / 2]);
        sum += float(sums[at + s]) * (place % 2 == 0 ? pair.x : pair.y);
    }
    precise float value = sum_from_zero(sum) * unit;
    return value;
}

KERNEL(expert_matmul) {
    uint item = LANE, slot = item / LANES, here = gl_WorkGroupID.x * ROWS, total = rows * parts;
    uint begin = gl_WorkGroupID.y, count = begin < uint(STEP_TOKENS * top) ? 1 : 0, expert = 0;
    if (GROUPED != 0) {
        expert = tiles[3 * begin];
        count = tiles[3 * begin + 2];
        begin = tiles[3 * begin + 1];
    } else if (count != 0) {
        expert = chosen[begin];
    }
    if (count == 0) return;
    for (uint i = item; i < ROWS * TOKENS * COUNT; i += WG) sums[i] = 0;
    barrier();
    uint row = (min(matrix_row(min(here + slot, total - 1), expert) - begin_row, uint(bound_rows) - 1)) * (2 * BLOCKS);
    uint m[TOKENS];
    int found[TOKENS];
    [[unroll]] for (uint t = 0; t < TOKENS; t++) {
        uint at = begin + min(t, count - 1);
        m[t] = (GROUPED != 0 ? uint(chosen[at]) : at) / per;
        found[t] = 0;
    }
    for (uint block = item % LANES; block < BLOCKS; block += LANES) {
        uvec4 low = codes[row + 2 * block], high = codes[row + 2 * block + 1];
        [[unroll]] for (int plane = 0; plane < 4; plane++) {
            uvec4 w = plane_of(low, plane), u = plane_of(high, plane);
            uint s = (block * 128 + plane / PLANES * (128 / EACH)) / GROUP;
            [[unroll]] for (uint t = 0; t < TOKENS; t++)
                if (t < count) {
                    uint at = 8 * block + 2 * plane;
                    found[t] = dot16(u, load_x(m[t], at + 1), dot16(w, load_x(m[t], at), found[t]));
                    if (COUNT > 1 && (plane + 1) % PLANES == 0) {
                        if (s < COUNT) atomicAdd(sums[(slot * TOKENS + t) * COUNT + s], found[t]);
                        found[t] = 0;
                    }
                }
        }
    }
    if (COUNT == 1)
        [[unroll]] for (uint t = 0; t < TOKENS; t++)
            if (t < count) atomicAdd(sums[slot * TOKENS + t], found[t]);
    barrier();
    for (uint i = item; i < ROWS * TOKENS; i += WG) {
        uint t = i % TOKENS, n = here + i / TOKENS;
        if (t >= count || n >= total) continue;
        uint pair = GROUPED != 0 ? chosen[begin + t] : begin, of = matrix_row(n, expert);
        if (of - begin_row < bound_rows) result[pair * columns + first + n] = value_of(i * COUNT, of, scale[pair / per]);
    }
}
