// The row of a product of one token, which is quantised to int8 in shared memory if it is f32.
BUFFER(0, readonly, uvec4, x);
BUFFER(1, readonly, float, scale);
BUFFER(2, readonly, vec4, weight);
const uint QUADS = COLS / 4;
const int HELD = (COLS / 4 + WG - 1) / WG;  // quads of x of an invocation, of which up to 16 are kept

vec4 gain_of(uint i) { return INPUT == 2 ? weight[i] : vec4(1.0); }
#define X_SPACE (4 * PITCH)
#define MORE(i) uintBitsToFloat(x[i])
#include "ternary_row.glsl"

// Quantises the row into shared memory; returns the scale.
float take_x(uint lane) {
    if (INPUT != 0) {
#define LOAD(i) if (i < HELD && lane + i * WG < QUADS) { v[i] = uintBitsToFloat(x[lane + i * WG]); gain[i] = gain_of(lane + i * WG); } \
                else { v[i] = vec4(0.0); gain[i] = vec4(0.0); }
        REPEAT_16(LOAD)
        return quantise(lane, QUADS, CHUNKS, PITCH, INPUT == 2, eps);
    }
    begin_sum(lane);
    barrier();
    int sum = 0;
    for (uint i = lane; i < 16 * CHUNKS; i += WG) sum += put(i, i < QUADS ? x[i / 4][i % 4] : 0, CHUNKS, PITCH);
    end_sum(sum);
    return scale[0];
}
