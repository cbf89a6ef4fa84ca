// requires: SUBGROUPS
// variants: DOT CONV
// ternary_decode of weights with a scale for each group of 64, 128 or 256 columns. A chunk of 16 bytes of codes is half a block of 128
// columns, and the chunks of a group are neighbouring invocations', which add their sums up. The terms lie in shared memory, where one
// invocation adds those of a row in their order. CONV: each row's result is a column's newest value, which is convolved (causal_conv).
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int LANES = 4;
layout(constant_id = 3) const int INPUT = 0;  // 0: int8 with a scale; 1: f32; 2: f32 before RMSNorm
layout(constant_id = 4) const int GLU = 0;    // rows n and n + rows / 2 are gate and up of out[n]
layout(constant_id = 5) const int RELU2 = 0;
layout(constant_id = 6) const int ADD = 0;
layout(constant_id = 7) const int CHUNKS = 2;  // of a row of codes, 16 bytes each: two for every 128 columns
layout(constant_id = 8) const int PITCH = 4;   // from one plane of x to the next: CHUNKS, and padding that spreads them over the banks
layout(constant_id = 9) const int GROUP = 128;
layout(constant_id = 10) const int EACH = 1;         // groups of a block of 128 columns, or the one of several
layout(constant_id = 11) const int TERM_PITCH = 17;  // of a row's terms: odd, and the number of groups at least
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, uint, w_scale);  // two f16 each
BUFFER(5, , float, result);
#if CONV
layout(constant_id = 12) const int TAPS = 4;
BUFFER(6, readonly, int, step_data);
BUFFER(7, readonly, float, taps);
BUFFER(8, , float, state);
layout(push_constant) uniform Push { float eps; int rows, token_seq, state_from, state_to; };
#include "states.glsl"
#else
layout(push_constant) uniform Push { float eps; int rows; };
#endif
const int EARLY = (CHUNKS + LANES - 1) / LANES;  // chunks of an invocation, of which up to 8 are loaded early
const uint COUNT = COLS / GROUP;
const uint SLOTS = WG / LANES;                              // rows, or pairs of rows, of a work-group
const uint SHARERS = GROUP > 128 ? GROUP / 64 : 2;          // chunks of a group, or of the groups of a block
shared float terms[(1 + GLU) * SLOTS * TERM_PITCH];
#include "ternary_input.glsl"
#include "signed_codes.glsl"

// The scale of row n's group s.
float unit_of(uint n, uint s) {
    uint at = n * COUNT + min(s, COUNT - 1);
    return scale_in(w_scale[at / 2], at);
}

// Puts the terms of a chunk of row n where they belong; all invocations of a row call it.
void multiply(uvec4 words, uint chunk, uint n, uint slot) {
    int sums[EACH];
    uvec4 weights = signed_codes(words);
    [[unroll]] for (uint j = 0; j < EACH; j++) {
        sums[j] = 0;
        [[unroll]] for (uint p = j * (4 / EACH); p < (j + 1) * (4 / EACH); p++)
            if (chunk < CHUNKS) sums[j] = product(weights << 2 * p, TOP_PAIRS, x_quads[p * PITCH + chunk], sums[j]);
        for (uint apart = 1; apart < SHARERS; apart *= 2) sums[j] += subgroupShuffleXor(sums[j], apart);
        uint s = chunk / SHARERS * EACH + j;
        if (chunk % SHARERS == 0 && s < COUNT) {
            precise float term = float(sums[j]) * unit_of(n, s);
            terms[slot * TERM_PITCH + s] = term;
        }
    }
}

#include "zero.glsl"
float total_of(uint slot) {
    precise float sum = 0.0;
    uint s = slot * TERM_PITCH, end = s + COUNT;
    for (; INPUT == 0 && s + 8 <= end; s += 8) {  // which are read before any is added; slower where the row is quantised here
        vec4 low = vec4(terms[s], terms[s + 1], terms[s + 2], terms[s + 3]);
        vec4 high = vec4(terms[s + 4], terms[s + 5], terms[s + 6], terms[s + 7]);
        sum = sum + low.x + low.y + low.z + low.w + high.x + high.y + high.z + high.w;
    }
    for (; s < end; s++) sum += terms[s];
    return sum_from_zero(sum);
}

#if CONV
// The part of column n's convolution that is of values in the state, which moves on by one.
float earlier_taps(uint n) {
    int seq = step_data[token_seq], source = state_source(seq);
    uint to = uint(step_data[state_to + seq]) * (TAPS - 1);
    float sum = 0.0;
    for (int j = 0; j < TAPS - 1; j++) {
        float old = source < 0 ? 0.0 : state[(source * (TAPS - 1) + j) * rows + n];
        sum += taps[n * TAPS + j] * old;
        if (j > 0) state[(to + j - 1) * rows + n] = old;
    }
    return sum;
}

// What becomes of its newest value, which is the state's last.
float convolved(uint n, float earlier, float value) {
    uint to = uint(step_data[state_to + step_data[token_seq]]) * (TAPS - 1);
    state[(to + TAPS - 2) * rows + n] = value;
    float sum = earlier + taps[n * TAPS + TAPS - 1] * value;
    return sum / (1.0 + exp(-sum));
}
#endif

KERNEL(ternary_groups_decode) {
    uint lane = LANE, part = lane % LANES, slot = lane / LANES;
    uint outs = GLU != 0 ? rows / 2 : rows, n0 = gl_WorkGroupID.x * SLOTS, n = min(n0 + slot, outs - 1);
    uint row = n * CHUNKS, up = GLU != 0 ? row + outs * CHUNKS : row;
#define FETCH(i) if (i < EARLY) { \
        uint chunk = min(part + i * LANES, CHUNKS - 1); \
        first[i] = codes[row + chunk]; \
        second[i] = GLU != 0 ? codes[up + chunk] : uvec4(0); \
    }
    REPEAT_8(FETCH)
#if CONV
    float earlier = lane < SLOTS && n0 + lane < outs ? earlier_taps(n0 + lane) : 0.0;
#endif
    float factor = take_x(lane) * UNFOLD;
#define MULTIPLY(i) if (i < EARLY) { \
        multiply(first[i], part + i * LANES, n, slot); \
        if (GLU != 0) multiply(second[i], part + i * LANES, n + outs, SLOTS + slot); \
    }
    REPEAT_8(MULTIPLY)
    for (uint i = 8; i < EARLY; i++) {
        uint chunk = part + i * LANES, at = min(chunk, CHUNKS - 1);
        multiply(codes[row + at], chunk, n, slot);
        if (GLU != 0) multiply(codes[up + at], chunk, n + outs, SLOTS + slot);
    }
    barrier();
    n = n0 + lane;
    if (lane >= SLOTS || n >= outs) return;
    precise float value = total_of(lane) * factor;
    if (GLU != 0) {
        precise float other = total_of(SLOTS + lane) * factor;
        value = act(value, RELU2 != 0) * other;
    }
#if CONV
    value = convolved(n, earlier, value);
#endif
    result[n] = ADD != 0 ? plus(result[n], value) : value;
}
