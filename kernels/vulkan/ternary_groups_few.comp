// requires: SUBGROUPS DOT
// ternary_matmul of weights with a scale for each GROUP of 64, 128 or 256 columns, for few tokens, TOKENS in a work-group. Two neighbouring invocations share
// HELD rows: each has half of every block of 128 columns. The subgroups of a work-group share the columns of the same rows: each takes one
// unit (a group of a block or two, or a block of EACH groups) of SUBS. Terms of SPAN such units lie in shared memory, where one invocation
// adds those of a row and token in their order.
#define WIDE 1
#include "ternary_group.glsl"
#include "signed_codes.glsl"
layout(constant_id = 6) const int TOKENS = 8;
layout(constant_id = 7) const int HELD = 2;
layout(constant_id = 8) const int SPAN = 4;
const uint PAIRS = SUBGROUP / 2, ROWS = PAIRS * HELD;
const uint UNITS = COUNT / EACH, TURN = SUBS * SPAN;  // units of a row, and those whose terms are in shared memory at a time
const uint HALF = (TOKENS + 1) / 2;                    // tokens whose terms one of a pair computes
const uint ROW_PITCH = TURN * EACH | 1, TOKEN_PITCH = ROWS * ROW_PITCH + 4;  // these spread over the banks
const uint SUMS = (ROWS * TOKENS + WG - 1) / WG;       // rows and tokens whose terms an invocation adds
shared float terms[2 * HALF * TOKEN_PITCH];

KERNEL(ternary_groups_few) {
    uint lane = LANE, sub = lane / SUBGROUP, part = lane % 2, pair = lane % SUBGROUP / 2, n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS;
    if (n0 >= rows) return;
    uint m0 = gl_WorkGroupID.z * TOKENS, last = STEP_TOKENS - 1;
    if (m0 > last) return;
    uvec4 held[SPAN * HELD * BLOCKS];
    uint scales[SPAN * HELD];
    float totals[SUMS];
    [[unroll]] for (int i = 0; i < SUMS; i++) totals[i] = 0.0;
#define FETCH(j, from) { \
        uint next = min(from + (j) * SUBS + sub, UNITS - 1); \
        [[unroll]] for (int h = 0; h < HELD; h++) { \
            uint n = min(n0 + h * PAIRS + pair, rows - 1); \
            scales[(j) * HELD + h] = w_scale[((first + n) * COUNT + next * EACH) / 2]; \
            [[unroll]] for (int b = 0; b < BLOCKS; b++) \
                held[((j) * HELD + h) * BLOCKS + b] = codes[n * ROW + (next * BLOCKS + b) * 2 + part]; \
        } \
    }
    [[unroll]] for (int j = 0; j < SPAN; j++) FETCH(j, 0)
    for (uint from = 0; from < UNITS; from += TURN) {
        [[unroll]] for (int j = 0; j < SPAN; j++) {
            uint unit = from + j * SUBS + sub;
            uvec4 words[HELD * BLOCKS];
            uint units[HELD];
            [[unroll]] for (int i = 0; i < HELD * BLOCKS; i++) words[i] = signed_codes(held[j * HELD * BLOCKS + i]);
            [[unroll]] for (int h = 0; h < HELD; h++) units[h] = scales[j * HELD + h];
            if (from + TURN < UNITS) FETCH(j, from + TURN)
            if (unit >= UNITS) continue;
            [[unroll]] for (int set = 0; set < EACH; set++) {
                int sums[HELD * TOKENS];
                [[unroll]] for (int i = 0; i < HELD * TOKENS; i++) sums[i] = 0;
                [[unroll]] for (int p = set * PLANES; p < (set + 1) * PLANES; p++) {
                    [[unroll]] for (int b = 0; b < BLOCKS; b++) {
                        uvec4 weights[HELD];
                        [[unroll]] for (int h = 0; h < HELD; h++) weights[h] = top_pairs(words[h * BLOCKS + b], p);
                        [[unroll]] for (int t = 0; t < TOKENS; t++) {
                            uvec4 v = load_x(min(m0 + t, last), (unit * BLOCKS + b) * 8 + p * 2 + part);
                            [[unroll]] for (int h = 0; h < HELD; h++) sums[h * TOKENS + t] = dot16(weights[h], v, sums[h * TOKENS + t]);
                        }
                    }
                }
                [[unroll]] for (int h = 0; h < HELD; h++) {
                    uint row = h * PAIRS + pair;
                    float scale_of = scale_in(units[h], (first + min(n0 + row, rows - 1)) * COUNT + unit * EACH + set);
                    [[unroll]] for (int i = 0; i < HALF; i++) {
                        int low = sums[h * TOKENS + i], high = sums[h * TOKENS + min(HALF + i, TOKENS - 1)];
                        int sum = (part == 0 ? low : high) + subgroupShuffleXor(part == 0 ? high : low, 1);
                        precise float value = float(sum) * scale_of;
                        terms[(part * HALF + i) * TOKEN_PITCH + row * ROW_PITCH + (j * SUBS + sub) * EACH + set] = value;
                    }
                }
            }
        }
        barrier();
        [[unroll]] for (int i = 0; i < SUMS; i++) {
            uint at = lane + i * WG, begin = at / ROWS * TOKEN_PITCH + at % ROWS * ROW_PITCH;
            if (at >= ROWS * TOKENS) break;
            precise float sum = totals[i];
            for (uint g = 0; g < min(TURN * EACH, COUNT - from * EACH); g++) sum += terms[begin + g];
            totals[i] = sum;
        }
        if (from + TURN < UNITS) barrier();
    }
    [[unroll]] for (int i = 0; i < SUMS; i++) {
        uint at = lane + i * WG, t = at / ROWS, n = n0 + at % ROWS;
        if (t < TOKENS && m0 + t <= last && n < rows) store(m0 + t, n, totals[i] * UNFOLD);
    }
}
