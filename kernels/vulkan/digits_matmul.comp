// requires: SUBGROUPS DOT
// dense_matmul of one row and a ternary table with a scale for each GROUP of 64, 128 or 256 columns, for the rows of the table that are bound: `rows` from
// `first` on. Elements of x are three digits each, from table_digits.comp. Two neighbouring invocations share two rows of the table: each has
// half of every block of 128 columns, of which DEPTH are on their way at a time.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int GROUP = 128;
layout(constant_id = 3) const int DEPTH = 4;  // at most 8
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, x);
BUFFER(2, readonly, float, units);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, uint, w_scale);  // two f16 each
BUFFER(5, writeonly, float, result);
layout(push_constant) uniform Push { int rows, first; };
const uint COUNT = COLS / GROUP, BLOCKS = COLS / 128, PAIRS = WG / 2;
const uint EACH = GROUP < 128 ? 128 / GROUP : 1, PLANES = 4 / EACH;  // groups of a block, or the one of several; bit pairs of a group
#define WIDE 1
#include "ternary_planes.glsl"
#include "signed_codes.glsl"
uvec4 first_codes[8], second_codes[8];   // on their way
uint first_scales[8], second_scales[8];  // and the words with their scales
ivec2 sums[3];                           // of both rows, for each digit of x
vec2 totals = vec2(0.0);
uint n0, part;

uint row_of(uint second) { return min(n0 + second * PAIRS, rows - 1); }
uint scale_at(uint second, uint block) { return (first + row_of(second)) * COUNT + block * 128 / GROUP; }

void add_digit(uvec4 one, uvec4 other, uvec4 v, inout ivec2 sum) { sum = ivec2(dot16(one, v, sum.x), dot16(other, v, sum.y)); }

void multiply(uvec4 one, uvec4 other, uint at) {
    add_digit(one, other, load_x(0, at), sums[0]);
    add_digit(one, other, load_x(1, at), sums[1]);
    add_digit(one, other, load_x(2, at), sums[2]);
}

void add_block(uint block, uvec4 one, uvec4 other, uint scale_word, uint other_word) {
    [[unroll]] for (uint set = 0; set < EACH; set++) {
        sums[0] = sums[1] = sums[2] = ivec2(0);
        [[unroll]] for (uint p = set * PLANES; p < (set + 1) * PLANES; p++)
            multiply(top_pairs(one, p), top_pairs(other, p), block * 8 + p * 2 + part);
        vec2 scale = vec2(scale_in(scale_word, scale_at(0, block) + set), scale_in(other_word, scale_at(1, block) + set));
        vec2 value = vec2(sums[0]) * 16384.0 + vec2(sums[1]) * 128.0 + vec2(sums[2]);
        totals += value * (scale * units[block * 128 / GROUP + set]);
    }
}

KERNEL(digits_matmul) {
    uint lane = LANE, start = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * 2 * PAIRS;
    n0 = start + lane / 2;
    part = lane % 2;
    if (STEP_ROWS == 0 || start >= rows) return;
#define FETCH(j) if (j < DEPTH) { \
        uint next = min(from + j, BLOCKS - 1); \
        first_codes[j] = codes[row_of(0) * (2 * BLOCKS) + next * 2 + part]; \
        second_codes[j] = codes[row_of(1) * (2 * BLOCKS) + next * 2 + part]; \
        first_scales[j] = w_scale[scale_at(0, next) / 2]; \
        second_scales[j] = w_scale[scale_at(1, next) / 2]; \
    }
    uint from = 0;
    REPEAT_8(FETCH)
    for (uint begin = 0; begin < BLOCKS; begin = from) {
        from = begin + DEPTH;
#define BLOCK_OF(j) if (j < DEPTH) { \
            uvec4 one = signed_codes(first_codes[j]), other = signed_codes(second_codes[j]); \
            uint scale_word = first_scales[j], other_word = second_scales[j]; \
            FETCH(j) \
            if (BLOCKS % DEPTH == 0 || begin + j < BLOCKS) add_block(begin + j, one, other, scale_word, other_word); \
        }
        REPEAT_8(BLOCK_OF)
    }
    vec2 sum = (totals + subgroupShuffleXor(totals, 1)) * UNFOLD;
    if (part == 0 && n0 < rows) result[first + n0] = sum.x;
    if (part == 0 && n0 + PAIRS < rows) result[first + n0 + PAIRS] = sum.y;
}
