// requires: SUBGROUPS DOT
// ternary_matmul of weights with a scale for each GROUP of 64, 128 or 256 columns, for few tokens, up to 8 in a work-group. Two neighbouring
// invocations share two rows: each has half of every block of 128 columns. The subgroups of a work-group share the columns of the same
// rows: each takes one unit (a group of a block or two, or a block of EACH groups) of SUBS. Terms of SPAN such units lie in shared memory,
// where one invocation adds those of a row and token in their order.
#define WIDE 1
#include "ternary_group.glsl"
#include "signed_codes.glsl"
layout(constant_id = 6) const int TOKENS = 8;
layout(constant_id = 7) const int SPAN = 4;            // at most 4
const uint PAIRS = SUBGROUP / 2, ROWS = 2 * PAIRS;     // rows of a work-group: first ones of the pairs, then second ones
const uint UNITS = COUNT / EACH, TURN = SUBS * SPAN;   // units of a row, and those whose terms are in shared memory at a time
const uint HALF = (TOKENS + 1) / 2;                    // tokens whose terms one of a pair computes
const uint ROW_PITCH = TURN * EACH | 1, TOKEN_PITCH = ROWS * ROW_PITCH + 4;  // these spread over the banks
const uint SUMS = (ROWS * TOKENS + WG - 1) / WG;       // rows and tokens whose terms an invocation adds
shared float terms[2 * HALF * TOKEN_PITCH];
uvec4 first_codes[8], second_codes[8];   // on their way: BLOCKS of each of SPAN units
uint first_scales[4], second_scales[4];  // and the words with their scales
ivec2 sums[8];                           // of both rows, for each token
uint n0, m0, last, part, pair;

#define EACH_TOKEN(F) F(0) F(1) F(2) F(3) F(4) F(5) F(6) F(7)
void multiply(uvec4 one, uvec4 other, uint at) {
#define ADD_TOKEN(t) if (t < TOKENS) { \
        uvec4 v = load_x(min(m0 + t, last), at); \
        sums[t] = ivec2(dot16(one, v, sums[t].x), dot16(other, v, sums[t].y)); \
    }
    EACH_TOKEN(ADD_TOKEN)
}

uint row_of(uint second) { return min(n0 + second * PAIRS + pair, rows - 1); }

// Puts the terms of a unit where they belong: the first of the pair has those of the first HALF of the tokens, the other the rest.
void put_terms(uint unit, uint place, uvec4 one, uvec4 more_one, uvec4 other, uvec4 more_other, uint scale_word, uint other_word) {
    [[unroll]] for (uint set = 0; set < EACH; set++) {
#define BEGIN_TOKEN(t) sums[t] = ivec2(0);
        EACH_TOKEN(BEGIN_TOKEN)
        [[unroll]] for (uint p = set * PLANES; p < (set + 1) * PLANES; p++) {
            multiply(top_pairs(one, p), top_pairs(other, p), unit * BLOCKS * 8 + 2 * p + part);
            if (BLOCKS > 1) multiply(top_pairs(more_one, p), top_pairs(more_other, p), unit * BLOCKS * 8 + 8 + 2 * p + part);
        }
        vec2 unit_of = vec2(scale_in(scale_word, (first + row_of(0)) * COUNT + unit * EACH + set),
                            scale_in(other_word, (first + row_of(1)) * COUNT + unit * EACH + set));
        uint to = part * HALF * TOKEN_PITCH + pair * ROW_PITCH + place * EACH + set;
#define PUT_TOKEN(t) if (t < HALF) { \
            ivec2 low = sums[t], high = sums[t + HALF < 8 ? t + HALF : 7]; \
            ivec2 sum = (part == 0 ? low : high) + subgroupShuffleXor(part == 0 ? high : low, 1); \
            precise vec2 term = vec2(sum) * unit_of; \
            terms[to + t * TOKEN_PITCH] = term.x; \
            terms[to + t * TOKEN_PITCH + PAIRS * ROW_PITCH] = term.y; \
        }
        EACH_TOKEN(PUT_TOKEN)
    }
}

KERNEL(ternary_groups_few) {
    uint lane = LANE, sub = lane / SUBGROUP;
    n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS;
    m0 = gl_WorkGroupID.z * TOKENS;
    last = STEP_TOKENS - 1;
    part = lane % 2;
    pair = lane % SUBGROUP / 2;
    if (n0 >= rows || m0 > last) return;
    float totals[4];
#define FETCH_BLOCK(j, b) \
    first_codes[(j) + 4 * (b)] = codes[row_of(0) * ROW + (next * BLOCKS + (b)) * 2 + part]; \
    second_codes[(j) + 4 * (b)] = codes[row_of(1) * ROW + (next * BLOCKS + (b)) * 2 + part];
#define FETCH(j) if (j < SPAN) { \
        uint next = min(from + j * SUBS + sub, UNITS - 1); \
        FETCH_BLOCK(j, 0) \
        if (BLOCKS > 1) { FETCH_BLOCK(j, 1) } \
        first_scales[j] = w_scale[((first + row_of(0)) * COUNT + next * EACH) / 2]; \
        second_scales[j] = w_scale[((first + row_of(1)) * COUNT + next * EACH) / 2]; \
    }
#define EACH_SUM(F) F(0) F(1) F(2) F(3)
#define BEGIN_SUM(i) totals[i] = 0.0;
    EACH_SUM(BEGIN_SUM)
    uint from = 0;
    REPEAT_4(FETCH)
    for (uint begin = 0; begin < UNITS; begin = from) {
        from = begin + TURN;
#define UNIT(j) if (j < SPAN) { \
            uvec4 one = signed_codes(first_codes[j]), other = signed_codes(second_codes[j]); \
            uvec4 more_one = signed_codes(first_codes[j + 4]), more_other = signed_codes(second_codes[j + 4]); \
            uint scale_word = first_scales[j], other_word = second_scales[j], unit = begin + j * SUBS + sub; \
            if (from < UNITS) FETCH(j) \
            if (unit < UNITS) put_terms(unit, j * SUBS + sub, one, more_one, other, more_other, scale_word, other_word); \
        }
        REPEAT_4(UNIT)
        barrier();
#define ADD_TERMS(i) if (i < SUMS && lane + i * WG < ROWS * TOKENS) { \
            uint at = lane + i * WG, terms_at = at / ROWS * TOKEN_PITCH + at % ROWS * ROW_PITCH; \
            precise float sum = totals[i]; \
            for (uint g = 0; g < min(TURN * EACH, COUNT - begin * EACH); g++) sum += terms[terms_at + g]; \
            totals[i] = sum; \
        }
        EACH_SUM(ADD_TERMS)
        if (from < UNITS) barrier();
    }
#define STORE_SUM(i) if (i < SUMS) { \
        uint at = lane + i * WG, t = at / ROWS, n = n0 + at % ROWS; \
        if (t < TOKENS && m0 + t <= last && n < rows) store(m0 + t, n, totals[i] * UNFOLD); \
    }
    EACH_SUM(STORE_SUM)
}
