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
layout(constant_id = 12) const int TURNS = 1;
#if CONV
layout(constant_id = 13) const int TAPS = 4;
BUFFER(6, readonly, int, step_data);
BUFFER(7, readonly, float, taps);
BUFFER(8, , float, state);
layout(push_constant) uniform Push { float eps; int rows, token_seq, state_from, state_to; };
#include "states.glsl"
#else
layout(push_constant) uniform Push { float eps; int rows; };
#endif
const uint EACH_ROW = (CHUNKS + LANES - 1) / LANES;  // chunks of an invocation in a row
const uint COUNT = COLS / GROUP;
const uint SLOTS = WG / LANES;                              // rows of a work-group at a time, and as many second ones
const uint UNITS = TURNS * EACH_ROW;                        // chunks of an invocation in all its rows, of which two are on their way
const uint SHARERS = GROUP > 128 ? GROUP / 64 : 2;          // chunks of a group, or of the groups of a block
shared float terms[2 * TURNS * SLOTS * TERM_PITCH];
#include "ternary_input.glsl"
#include "signed_codes.glsl"

uint n0, outs, part, slot;

// Codes of the same columns of two rows, and the words with their scales.
struct Chunks {
    uvec4 one, other;
    uint unit, other_unit;
};

// The row of a turn, or the one that takes the same columns along: `up` where W holds gates and ups.
uint row_of(uint turn, uint which) {
    uint n = n0 + ((GLU != 0 ? turn : 2 * turn + which) * SLOTS + slot);
    return min(n, outs - 1) + (GLU != 0 ? which * outs : 0);
}

uint scale_at(uint n, uint chunk) { return n * COUNT + min(chunk / SHARERS * EACH, COUNT - 1); }

// The scale of group j of the block that the chunk belongs to.
float unit_of(uint word, uint n, uint chunk, uint j) {
    uint at = n * COUNT + min(chunk / SHARERS * EACH + j, COUNT - 1);
    return scale_in(EACH == 1 ? word : w_scale[at / 2], at);
}

Chunks fetch(uint unit) {
    uint turn = unit / EACH_ROW, chunk = min(part + unit % EACH_ROW * LANES, CHUNKS - 1);
    uint one = row_of(turn, 0), other = row_of(turn, 1);
    uint place = scale_at(one, chunk) / 2, other_place = scale_at(other, chunk) / 2;
    return Chunks(codes[one * CHUNKS + chunk], codes[other * CHUNKS + chunk], w_scale[place], w_scale[other_place]);
}

// Puts the terms of a chunk of two rows where they belong; all invocations of a row call it.
void multiply(Chunks of, uint turn, uint chunk) {
    uvec4 weights = signed_codes(of.one), others = signed_codes(of.other);
    [[unroll]] for (uint j = 0; j < EACH; j++) {
        ivec2 sum = ivec2(0);
        [[unroll]] for (uint p = j * (4 / EACH); p < (j + 1) * (4 / EACH); p++) {
            if (chunk < CHUNKS) {
                uvec4 quads = x_quads[p * PITCH + chunk];
                sum.x = product(weights << 2 * p, TOP_PAIRS, quads, sum.x);
                sum.y = product(others << 2 * p, TOP_PAIRS, quads, sum.y);
            }
        }
        for (uint apart = 1; apart < SHARERS; apart *= 2) sum += subgroupShuffleXor(sum, apart);
        uint s = chunk / SHARERS * EACH + j;
        if (chunk % SHARERS == 0 && s < COUNT) {
            vec2 scales = vec2(unit_of(of.unit, row_of(turn, 0), chunk, j), unit_of(of.other_unit, row_of(turn, 1), chunk, j));
            precise vec2 term = vec2(sum) * scales;
            terms[(2 * turn * SLOTS + slot) * TERM_PITCH + s] = term.x;
            terms[((2 * turn + 1) * SLOTS + slot) * TERM_PITCH + s] = term.y;
        }
    }
}

#include "zero.glsl"
float total_of(uint slot) {
    precise float sum = 0.0;
    uint s = slot * TERM_PITCH, end = s + COUNT;
    for (; s + 8 <= end; s += 8) {  // which are read before any is added
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
    uint lane = LANE;
    part = lane % LANES, slot = lane / LANES;
    outs = GLU != 0 ? rows / 2 : rows;
    const uint each = (2 - GLU) * TURNS * SLOTS;  // results of a work-group
    n0 = gl_WorkGroupID.x * each;
    Chunks now, soon = fetch(0), later = fetch(min(1, UNITS - 1));
#if CONV
    float earlier = lane < each && n0 + lane < outs ? earlier_taps(n0 + lane) : 0.0;
#endif
    float factor = take_x(lane) * UNFOLD;
    [[dont_unroll]] for (uint unit = 0; unit < UNITS; unit++) {
        now = soon;
        soon = later;
        later = fetch(min(unit + 2, UNITS - 1));
        multiply(now, unit / EACH_ROW, part + unit % EACH_ROW * LANES);
    }
    barrier();
    uint n = n0 + lane;
    if (lane >= each || n >= outs) return;
    uint at = GLU != 0 ? lane + lane / SLOTS * SLOTS : lane;
    precise float value = total_of(at) * factor;
    if (GLU != 0) {
        precise float other = total_of(at + SLOTS) * factor;
        value = act(value, RELU2 != 0) * other;
    }
#if CONV
    value = convolved(n, earlier, value);
#endif
    result[n] = ADD != 0 ? plus(result[n], value) : value;
}
