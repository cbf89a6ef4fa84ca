// variants: SUBGROUPS
// Quantisations with a Walsh-Hadamard transform, whole: norm_quant (KIND 0), glu_norm_quant (1) and gated_quant (2), the last also without a
// transform (BLOCK 1). One work-group a token. 32 invocations have 1,024 neighbours of the row, 32 each, which they exchange once: before it,
// an invocation's are 32 apart, behind it they are neighbours. What is transformed is a row without the factors of RMSNorm (not of heads)
// and of the transform: they are factors of the whole row.
layout(constant_id = 1) const int DIM = 1024;
layout(constant_id = 4) const int KIND = 0;
layout(constant_id = 5) const int NORM = 0;
layout(constant_id = 6) const int BLOCK = 1024;  // at most 1,024
layout(constant_id = 7) const int SIGNS = 0;
layout(constant_id = 8) const int HEAD = 128;  // a multiple of 32 where NORM, or the row
layout(constant_id = 9) const int SILU = 0;
layout(constant_id = 10) const int UNTILE = 0;  // as in gated_values
layout(constant_id = 11) const int SLOTS = 1;   // teams of 32 that exchange at a time
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, x);
BUFFER(2, readonly, float, gate);
BUFFER(3, readonly, float, weight);
BUFFER(4, readonly, float, signs);
BUFFER(5, writeonly, uvec4, codes);
BUFFER(6, writeonly, float, scale);
layout(push_constant) uniform Push { float eps; };
#include "activation.glsl"

const uint TEAM = 32, CHUNK = TEAM * TEAM, PITCH = TEAM + 1, HEADS = DIM / HEAD, ROUNDS = (WG / TEAM + SLOTS - 1) / SLOTS;
shared float tile[SLOTS * TEAM * PITCH];
shared float head_parts[KIND == 2 && NORM != 0 ? WG : 1], head_factors[KIND == 2 && NORM != 0 ? HEADS : 1];
float v[32];

#define PAIR(i, apart) { \
        float a = v[2 * (i) - ((i) & (apart) - 1)], b = v[2 * (i) - ((i) & (apart) - 1) + (apart)]; \
        v[2 * (i) - ((i) & (apart) - 1)] = a + b; \
        v[2 * (i) - ((i) & (apart) - 1) + (apart)] = a - b; \
    }
#define PAIRS_4(i, apart) PAIR(i, apart) PAIR(i + 1, apart) PAIR(i + 2, apart) PAIR(i + 3, apart)
#define PAIRS(apart) PAIRS_4(0, apart) PAIRS_4(4, apart) PAIRS_4(8, apart) PAIRS_4(12, apart)

// The head from which the head at `to` of the result comes.
uint head_at(uint to) { return UNTILE != 0 ? to % (HEADS / UNTILE) * UNTILE + to / (HEADS / UNTILE) : to; }

// Leaves the factor of each head.
void norm_heads(uint row, uint lane) {
    vec2 squares = vec2(0.0);
    uint from = row + lane * TEAM;
#define SQUARE(i) squares += vec2(x[from + (i)] * x[from + (i)], x[from + 16 + (i)] * x[from + 16 + (i)]);
    if (lane * TEAM < DIM) { REPEAT_16(SQUARE) }
    head_parts[lane] = squares.x + squares.y;
    barrier();
    for (uint h = lane; h < HEADS; h += WG) {
        float sum = 0.0;
        for (uint i = 0; i < HEAD / TEAM; i++) sum += head_parts[h * (HEAD / TEAM) + i];
        head_factors[h] = 1.0 / sqrt(sum / float(HEAD) + eps);
    }
    barrier();
}

// Columns `at` and the three TEAM, 2 TEAM and 3 TEAM behind it of the row of token m, before the transform and its signs.
vec4 values(uint m, uint at) {
    uint row = m * DIM;
#define FOUR(name, i) vec4(name[i], name[(i) + TEAM], name[(i) + 2 * TEAM], name[(i) + 3 * TEAM])
    if (KIND == 0) return FOUR(x, row + at);
    if (KIND == 1) return act(FOUR(x, 2 * row + at)) * FOUR(x, 2 * row + DIM + at);
    vec4 y, g;
    [[unroll]] for (uint j = 0; j < 4; j++) {
        uint c = at + j * TEAM, h = head_at(c / HEAD), i = c % HEAD;
        y[j] = x[row + h * HEAD + i];
        g[j] = gate[row + h * HEAD + i];
        if (NORM != 0) y[j] *= head_factors[h] * weight[i];
    }
    return y * (SILU != 0 ? g : vec4(1.0)) / (1.0 + exp(-g));
}

KERNEL(transform_quant) {
    uint m = gl_WorkGroupID.x, lane = LANE, team = lane / TEAM, t = lane % TEAM, from = team * CHUNK + t;
    if (m >= STEP_TOKENS) return;
    const bool normed = NORM != 0 && KIND != 2;
    if (KIND == 2 && NORM != 0) norm_heads(m * DIM, lane);
    float squares = 0.0, largest = 0.0;
#define LOAD(i) { \
        uint at = from + 4 * TEAM * (i); \
        vec4 y = vec4(0.0); \
        if (at < DIM) { \
            y = values(m, at); \
            squares += dot(y, y); \
            if (normed) y *= FOUR(weight, at); \
            if (SIGNS != 0) y *= FOUR(signs, at); \
        } \
        v[4 * (i)] = y.x, v[4 * (i) + 1] = y.y, v[4 * (i) + 2] = y.z, v[4 * (i) + 3] = y.w; \
    }
    REPEAT_8(LOAD)
#define FAR(apart) if ((apart) * TEAM < BLOCK) { PAIRS(apart) }
    FAR(1) FAR(2) FAR(4) FAR(8) FAR(16)
    uint place = team % SLOTS * TEAM * PITCH;
    for (uint turn = 0; turn < ROUNDS; turn++) {
        if (turn > 0) barrier();
        if (team / SLOTS == turn) {
#define PUT(i) tile[place + (i) * PITCH + t] = v[i]; tile[place + (16 + (i)) * PITCH + t] = v[16 + (i)];
            REPEAT_16(PUT)
        }
        barrier();
        if (team / SLOTS == turn) {
#define GET(i) v[i] = tile[place + t * PITCH + (i)]; v[16 + (i)] = tile[place + t * PITCH + 16 + (i)];
            REPEAT_16(GET)
        }
    }
#define NEAR(apart) if ((apart) < BLOCK) { PAIRS(apart) }
    NEAR(1) NEAR(2) NEAR(4) NEAR(8) NEAR(16)
#define QUAD(i) vec4(v[4 * (i)], v[4 * (i) + 1], v[4 * (i) + 2], v[4 * (i) + 3])
#define LOOK(i) largest = max(largest, max4(abs(QUAD(i))));
    REPEAT_8(LOOK)
    vec2 found = group_sum_max(squares, largest);
    float inverse = BLOCK > 1 ? 1.0 / sqrt(float(BLOCK)) : 1.0;
    if (normed) inverse /= sqrt(found.x / float(DIM) + eps);
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    uint to = team * CHUNK + t * TEAM;
    if (to < DIM) {
#define CODES(i) quantised(QUAD(i) * factor)
        codes[(m * DIM + to) / 16] = uvec4(CODES(0), CODES(1), CODES(2), CODES(3));
        codes[(m * DIM + to) / 16 + 1] = uvec4(CODES(4), CODES(5), CODES(6), CODES(7));
    }
    if (lane == 0) scale[m] = largest / 127.0;
}
