// requires: SUBGROUPS
// Rows of x for the compact head: evened out as its columns are, in 16 bits, whose high and low eight are
// separate bytes, 16 columns together like the codes of head_pack. Also the bound of a score's error. A work-group a row.
// NORM: does the work of norm_rows first, in the same order: the tokens must be those of its logits.
#include "head_offset.glsl"
#include "head_layout.glsl"
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32, at most 32 WG
layout(constant_id = 2) const int NORM = 0;
layout(constant_id = 3) const int ONE = 0;    // the step has one token, whose row this is
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, gain);
BUFFER(3, readonly, vec4, column);
BUFFER(4, writeonly, vec4, normed);  // where NORM
BUFFER(5, writeonly, uint, planes);
BUFFER(6, writeonly, vec4, params);
BUFFER(7, writeonly, uint, state);
layout(push_constant) uniform Push { float eps; int rows; };
const float LIMIT = 32512.0;  // 127 * 256: the high bytes stay below 128 for half a per cent more, too
const float DEVIATIONS = 7.5 * 0.288675135 * 1.01;  // t / sqrt(12), and 1 % for rounding to f32
const uint QUADS = COLS / 4, CHUNKS = COLS / 32;
const int HELD = (COLS / 4 + WG - 1) / WG;

shared vec4 sums_of[SUBS];

uint bytes_of(ivec4 q) { return uint(q.x & 0xFF | (q.y & 0xFF) << 8 | (q.z & 0xFF) << 16 | q.w << 24); }

// Sums of x, y and z over the work-group, and the greatest w.
vec4 together(vec4 v) {
    v = vec4(subgroupAdd(v.xyz), subgroupMax(v.w));
    if (gl_SubgroupInvocationID == 0) sums_of[gl_SubgroupID] = v;
    barrier();
    v = sums_of[0];
    [[unroll]] for (int i = 1; i < SUBS; i++) v = vec4(v.xyz + sums_of[i].xyz, max(v.w, sums_of[i].w));
    barrier();
    return v;
}

KERNEL(head_rows) {
    uint r = gl_WorkGroupID.x, lane = LANE;
    if (ONE == 0 && r >= STEP_ROWS) return;
    uint from = (NORM != 0 && ONE == 0 ? uint(step_data[rows + r]) : r) * QUADS;
    vec4 v[8], evened[8], gains[8];
#define HOLD(i) if (i < HELD) { \
        uint at = lane + i * WG; \
        v[i] = at < QUADS ? x[from + at] : vec4(0.0); \
        gains[i] = NORM == 0 ? vec4(1.0) : at < QUADS ? gain[at] : vec4(0.0); \
        evened[i] = at < QUADS ? column[at] : vec4(0.0); \
    }
    REPEAT_8(HOLD)
    float squares = 0.0, square = 0.0, largest = 0.0;
#define LOOK(i) if (i < HELD) { \
        squares += dot(v[i], v[i]); \
        evened[i] *= v[i] * gains[i]; \
        square += dot(evened[i], evened[i]); \
        largest = max(largest, max4(abs(evened[i]))); \
    }
    REPEAT_8(LOOK)
    vec4 found = together(vec4(squares, square, 0.0, largest));
    float norm = NORM != 0 ? 1.0 / sqrt(found.x / float(COLS) + eps) : 1.0;
    float unit = found.w * norm / LIMIT, inverse = unit > 0.0 ? norm / unit : 0.0, base = 0.0, lost = 0.0;
#define SPLIT(i) if (i < HELD && lane + i * WG < QUADS) { \
        uint at = lane + i * WG, to = ((4 * r + at / 4 % 2) * CHUNKS + at / 8) * 4 + at % 4; \
        if (NORM != 0) normed[r * QUADS + at] = v[i] * norm * gains[i]; \
        ivec4 q = ivec4(roundEven(evened[i] * inverse)), high = (q + 128) >> 8; \
        planes[to] = bytes_of(high); \
        planes[to + 2 * CHUNKS * 4] = bytes_of(q - 256 * high); \
        base += dot(vec4(q), head_offsets(4 * at)); \
        vec4 rest = evened[i] * norm - vec4(q) * unit; \
        lost += dot(rest, rest); \
    }
    REPEAT_8(SPLIT)
    vec4 more = together(vec4(base, lost, 0.0, 0.0));
    if (lane == 0) {
        params[r] = vec4(unit, more.x, sqrt(found.y) * norm * DEVIATIONS, sqrt(more.y) * 1.01);
        state[r] = 0;  // less than any key
    }
    if (r == 0)
        for (uint i = MAX_ROWS + lane; i < STATE_FOUND; i += WG) state[i] = 0;
}
