// requires: SUBGROUPS
// Rows of x as the compact head takes them: evened out as its columns are, in 16 bits, of which the high and the low eight are
// bytes of their own, 16 columns together as the codes of head_pack are. Also what bounds a score's error. A work-group a row.
// NORM: does the work of norm_rows before, in the same order: the tokens are to be those of the logits that come of it.
#include "head_offset.glsl"
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32, at most 32 WG
layout(constant_id = 2) const int NORM = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, gain);
BUFFER(3, readonly, vec4, column);
BUFFER(4, writeonly, vec4, normed);  // where NORM
BUFFER(5, writeonly, uint, planes);
BUFFER(6, writeonly, vec4, params);
BUFFER(7, writeonly, uint, state);
layout(push_constant) uniform Push { int rows; float eps; };
const float LIMIT = 32512.0;  // 127 * 256
const float DEVIATIONS = 7.5 * 0.288675135 * 1.01;  // t / sqrt(12), and 1 % for rounding to f32
const uint QUADS = COLS / 4, CHUNKS = COLS / 32;
const int HELD = (COLS / 4 + WG - 1) / WG;

uint bytes_of(ivec4 q) { return uint(q.x & 0xFF | (q.y & 0xFF) << 8 | (q.z & 0xFF) << 16 | q.w << 24); }

KERNEL(head_rows) {
    uint r = gl_WorkGroupID.x, lane = LANE;
    if (r >= STEP_ROWS) return;
    uint from = (NORM != 0 ? uint(step_data[rows + r]) : r) * QUADS;
    vec4 v[8], evened[8];
    float squares = 0.0, largest = 0.0, square = 0.0;
#define HOLD(i) if (i < HELD) { \
        uint at = lane + i * WG; \
        v[i] = at < QUADS ? x[from + at] : vec4(0.0); \
        evened[i] = at < QUADS ? column[at] : vec4(0.0); \
        squares += dot(v[i], v[i]); \
    }
    REPEAT_8(HOLD)
    float inverse_norm = NORM != 0 ? 1.0 / sqrt(group_sum_max(squares, 0.0).x / float(COLS) + eps) : 1.0;
#define EVEN(i) if (i < HELD && lane + i * WG < QUADS) { \
        if (NORM != 0) normed[r * QUADS + lane + i * WG] = v[i] = v[i] * inverse_norm * gain[lane + i * WG]; \
        evened[i] *= v[i]; \
        largest = max(largest, max4(abs(evened[i]))); \
        square += dot(evened[i], evened[i]); \
    }
    REPEAT_8(EVEN)
    vec2 found = group_sum_max(square, largest);
    float unit = found.y / LIMIT, inverse = found.y > 0.0 ? LIMIT / found.y : 0.0, base = 0.0, lost = 0.0;
#define SPLIT(i) if (i < HELD && lane + i * WG < QUADS) { \
        uint at = lane + i * WG, to = ((4 * r + at / 4 % 2) * CHUNKS + at / 8) * 4 + at % 4; \
        ivec4 q = ivec4(roundEven(evened[i] * inverse)), high = (q + 128) >> 8; \
        planes[to] = bytes_of(high); \
        planes[to + 2 * CHUNKS * 4] = bytes_of(q - 256 * high); \
        base += dot(vec4(q), head_offsets(4 * at)); \
        vec4 rest = evened[i] - vec4(q) * unit; \
        lost += dot(rest, rest); \
    }
    REPEAT_8(SPLIT)
    base = group_sum_max(base, 0.0).x;
    lost = group_sum_max(lost, 0.0).x;
    if (lane == 0) {
        params[r] = vec4(unit, base, sqrt(found.x) * DEVIATIONS, sqrt(lost) * 1.01);
        state[r] = 0;  // less than any key
        if (r == 0) state[8] = 0;  // STATE_ARRIVALS
    }
}
