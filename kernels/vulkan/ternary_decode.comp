// variants: SUBGROUPS DOT
// out[n] = f32(sum of x[k] w[n, k]) * (scale * w_scale[n]) for one token, whose x is quantised to int8 here if it is f32.
// LANES invocations share a row of W and have its loads in flight before x arrives; x is read once, too.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int LANES = 4;
layout(constant_id = 3) const int INPUT = 0;  // 0: int8 with a scale; 1: f32; 2: f32 before RMSNorm
layout(constant_id = 4) const int GLU = 0;    // rows n and n + rows / 2 are gate and up of out[n]
layout(constant_id = 5) const int RELU2 = 0;
layout(constant_id = 6) const int ADD = 0;
layout(constant_id = 7) const int CHUNKS = 2;  // of a row of codes, 16 bytes each: two for every 128 columns
layout(constant_id = 8) const int PITCH = 4;   // from one plane of x to the next: CHUNKS, and padding that spreads them over the banks
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { float eps; int rows; };
const int EARLY = (CHUNKS + LANES - 1) / LANES;  // chunks of an invocation, of which up to 8 are loaded early

#include "ternary_input.glsl"

KERNEL(ternary_decode) {
    uint lane = LANE, part = lane % LANES;
    uint outs = GLU != 0 ? rows / 2 : rows;
    uint n = gl_WorkGroupID.x * (WG / LANES) + lane / LANES;
    uint row = min(n, outs - 1) * CHUNKS, up = GLU != 0 ? row + outs * CHUNKS : row;
#define FETCH(i) if (i < EARLY) { \
        uint chunk = min(part + i * LANES, CHUNKS - 1); \
        first[i] = codes[row + chunk]; \
        second[i] = GLU != 0 ? codes[up + chunk] : uvec4(0); \
    }
    REPEAT_8(FETCH)
    float unit = take_x(lane);
    Sums all = NONE;
#define MULTIPLY(i) if (i < EARLY) all = products(first[i], second[i], part + i * LANES, all, CHUNKS, PITCH, GLU != 0);
    REPEAT_8(MULTIPLY)
    for (uint chunk = part + 8 * LANES; chunk < CHUNKS; chunk += LANES)
        all = products(codes[row + chunk], GLU != 0 ? codes[up + chunk] : uvec4(0), chunk, all, CHUNKS, PITCH, GLU != 0);
    ivec2 sums = sums_of_lanes(all, lane, LANES, GLU != 0);
    if (part != 0 || n >= outs) return;
    float value = scaled(sums.x, unit, w_scale[n]);
    if (GLU != 0) value = act(value, RELU2 != 0) * scaled(sums.y, unit, w_scale[n + outs]);
    result[n] = ADD != 0 ? plus(result[n], value) : value;
}
