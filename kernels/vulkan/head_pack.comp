// requires: SUBGROUPS
// The compact head: a matrix of f16 in 4 bits a weight, with a bound on each score's error. Row n is stored as codes
// 0 ... 15: W[n, k] ~ column[k] * size[n].x * (code - offset[k]). `column` evens out columns of unlike size, size.x is the
// greatest magnitude of the row, so evened, over 7.5, and `offset` is 7.5 plus a dither that does not depend on the weights, so
// that errors are uniform and independent (decision 0060 has the proof). size.y is the norm of the stored row,
// without the column sizes. Sixteen bytes of codes are 32 columns: byte b has those at b (low bits) and at 16 + b.
#include "head_offset.glsl"
#include "head_layout.glsl"
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32
BUFFER(0, readonly, uvec4, weight);
layout(push_constant) uniform Push { int rows; };

vec4 halves(uint a, uint b) { return vec4(unpackHalf2x16(a), unpackHalf2x16(b)); }

#if ENTRY_head_columns
BUFFER(1, writeonly, float, column);
const int SAMPLED = 4096;  // rows, about, that a column's size is estimated from
shared vec4 sums[2 * WG];

// A work-group has 32 columns; groups of four of its invocations take rows by turns.
KERNEL(head_columns) {
    uint lane = LANE, part = lane % 4, slots = WG / 4;
    uint stride = rows / SAMPLED + 1;
    vec4 low = vec4(0.0), high = vec4(0.0);
    for (uint n = lane / 4 * stride; n < rows; n += slots * stride) {
        uvec4 words = weight[n * (COLS / 8) + gl_WorkGroupID.x * 4 + part];
        vec4 a = halves(words.x, words.y), b = halves(words.z, words.w);
        low += a * a;
        high += b * b;
    }
    sums[2 * lane] = low;
    sums[2 * lane + 1] = high;
    barrier();
    if (lane >= 32) return;
    float sum = 0.0;
    for (uint slot = 0; slot < slots; slot++) sum += sums[slot * 8 + lane / 4][lane % 4];
    float rms = sqrt(sum / SAMPLED);
    column[gl_WorkGroupID.x * 32 + lane] = rms > 0.0 && rms < INFINITY ? rms : 1.0;
}
#else
BUFFER(1, readonly, vec4, column);
BUFFER(2, writeonly, uvec4, codes);
BUFFER(3, writeonly, vec2, size);

uint code_word(vec4 evened, float inverse, uint k, inout float squares) {
    vec4 offset = head_offsets(k);
    vec4 code = roundEven(clamp(evened * inverse + offset, 0.0, 15.0));
    squares += dot(code - offset, code - offset);
    uvec4 c = uvec4(code);
    return c.x | c.y << 8 | c.z << 16 | c.w << 24;
}

// A work-group has a row, an invocation 32 columns of it: COLS / 32 of them have any.
KERNEL(head_pack) {
    uint n = gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x, lane = LANE;
    if (n >= rows) return;
    vec4 v[8];
    float largest = 0.0, odd = 0.0;
#define LOOK(i) { \
        uvec4 words = weight[n * (COLS / 8) + lane * 4 + i / 2]; \
        v[i] = (i % 2 == 0 ? halves(words.x, words.y) : halves(words.z, words.w)) / column[lane * 8 + i]; \
        largest = max(largest, max4(abs(v[i]))); \
        odd += dot(vec4(not(lessThan(abs(v[i]), vec4(INFINITY)))), vec4(1.0)); \
    }
    if (lane < COLS / 32) {
        REPEAT_8(LOOK)
    }
    vec2 found = group_sum_max(odd, largest);
    float step = found.y * (1.000001 / 7.5);
    bool finite = found.x == 0.0;
    float inverse = finite && step > 0.0 ? 1.0 / step : 0.0, squares = 0.0;
    if (lane < COLS / 32) {
        uint word[8];
#define PACK(i) word[i] = code_word(inverse > 0.0 ? v[i] : vec4(0.0), inverse, lane * 32 + 4 * i, squares);
        REPEAT_8(PACK)
        uvec4 low = uvec4(word[0], word[1], word[2], word[3]), high = uvec4(word[4], word[5], word[6], word[7]);
        codes[CODES_AT + n * (COLS / 32) + lane] = low | high << 4;
    }
    squares = group_sum_max(squares, 0.0).x;
    float stored = finite ? step : INFINITY;  // a weight is NaN: the row is always in doubt
    if (lane == 0) size[SIZES_AT + n] = vec2(stored, stored * sqrt(squares) * 1.0001);
}
#endif
