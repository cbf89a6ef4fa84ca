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

// Puts the i-th vector of 16 activations in its place; returns their sum.
int put_vector(uint i, uvec4 words) {
    x_quads[i % 8 / 2 * PITCH + i / 8 * 2 + i % 2] = words;
    return dot4(0x01010101u, words.x, dot4(0x01010101u, words.y, dot4(0x01010101u, words.z, dot4(0x01010101u, words.w, 0))));
}

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
    if (COLS % 16 == 0) {  // vectors of codes stay whole, and several are on their way
        for (uint from = lane; from < 4 * CHUNKS; from += 8 * WG) {
            uvec4 words[8];
#define ASK(i) words[i] = from + i * WG < COLS / 16 ? x[from + i * WG] : uvec4(0);
            REPEAT_8(ASK)
#define KEEP(i) if (from + i * WG < 4 * CHUNKS) sum += put_vector(from + i * WG, words[i]);
            REPEAT_8(KEEP)
        }
    } else {
        for (uint i = lane; i < 16 * CHUNKS; i += WG) sum += put(i, i < QUADS ? x[i / 4][i % 4] : 0, CHUNKS, PITCH);
    }
    end_sum(sum);
    return scale[0];
}
