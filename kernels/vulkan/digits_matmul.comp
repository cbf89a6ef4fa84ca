// requires: SUBGROUPS DOT
// dense_matmul of a ternary table with a scale for each GROUP of 64, 128 or 256 columns, for the rows of the table that are bound: `rows` of
// `total`. Elements of x are three digits each, from table_digits.comp. Two neighbouring invocations share HELD rows of the table: each has
// half of every block of 128 columns, of which DEPTH are on their way at a time. TOKENS rows of x share a read of the table.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int GROUP = 128;
layout(constant_id = 3) const int TOKENS = 1;
layout(constant_id = 4) const int HELD = 2;
layout(constant_id = 5) const int DEPTH = 4;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, x);
BUFFER(2, readonly, float, units);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, uint, w_scale);  // two f16 each
BUFFER(5, writeonly, float, result);
layout(push_constant) uniform Push { int rows, first, total; };
const uint COUNT = COLS / GROUP, BLOCKS = COLS / 128, PAIRS = WG / 2;
const uint EACH = GROUP < 128 ? 128 / GROUP : 1, PLANES = 4 / EACH;  // groups of a block, or the one of several; bit pairs of a group
#define WIDE 1
#include "ternary_planes.glsl"
#include "signed_codes.glsl"

KERNEL(digits_matmul) {
    uint lane = LANE, part = lane % 2, count = STEP_ROWS, t0 = gl_WorkGroupID.z * TOKENS;
    uint n0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * PAIRS * HELD + lane / 2;
    if (t0 >= count || n0 - lane / 2 >= rows) return;
    uvec4 held[DEPTH * HELD];
    uint scales[DEPTH * HELD];
    float totals[HELD * TOKENS];
    [[unroll]] for (int i = 0; i < HELD * TOKENS; i++) totals[i] = 0.0;
#define GROUP_OF(h, block) ((first + min(n0 + (h) * PAIRS, rows - 1)) * COUNT + (block) * 128 / GROUP)
#define FETCH(j, block) { \
        uint next = min(block, BLOCKS - 1); \
        [[unroll]] for (int h = 0; h < HELD; h++) { \
            held[(j) * HELD + h] = codes[min(n0 + h * PAIRS, rows - 1) * (2 * BLOCKS) + next * 2 + part]; \
            scales[(j) * HELD + h] = w_scale[GROUP_OF(h, next) / 2]; \
        } \
    }
    [[unroll]] for (int j = 0; j < DEPTH; j++) FETCH(j, j)
    for (uint from = 0; from < BLOCKS; from += DEPTH) {
        [[unroll]] for (int j = 0; j < DEPTH; j++) {
            uint block = from + j;
            uvec4 words[HELD];
            uint pairs[HELD];
            [[unroll]] for (int h = 0; h < HELD; h++) {
                words[h] = signed_codes(held[j * HELD + h]);
                pairs[h] = scales[j * HELD + h];
            }
            FETCH(j, block + DEPTH)
            if (BLOCKS % DEPTH != 0 && block >= BLOCKS) continue;
            [[unroll]] for (int set = 0; set < EACH; set++) {
                ivec3 sums[HELD * TOKENS];
                [[unroll]] for (int i = 0; i < HELD * TOKENS; i++) sums[i] = ivec3(0);
                [[unroll]] for (int p = int(set * PLANES); p < (set + 1) * PLANES; p++) {
                    uvec4 weights[HELD];
                    [[unroll]] for (int h = 0; h < HELD; h++) weights[h] = top_pairs(words[h], p);
                    [[unroll]] for (int t = 0; t < TOKENS; t++) {
                        uint row = min(t0 + t, count - 1) * 3;
                        [[unroll]] for (int d = 0; d < 3; d++) {
                            uvec4 v = load_x(row + d, block * 8 + p * 2 + part);
                            [[unroll]] for (int h = 0; h < HELD; h++) sums[h * TOKENS + t][d] = dot16(weights[h], v, sums[h * TOKENS + t][d]);
                        }
                    }
                }
                [[unroll]] for (int t = 0; t < TOKENS; t++) {
                    float unit = units[min(t0 + t, count - 1) * COUNT + block * 128 / GROUP + set];
                    [[unroll]] for (int h = 0; h < HELD; h++) {
                        float value = dot(vec3(sums[h * TOKENS + t]), vec3(16384.0, 128.0, 1.0));
                        totals[h * TOKENS + t] += value * (unit * scale_in(pairs[h], GROUP_OF(h, block) + set));
                    }
                }
            }
        }
    }
    [[unroll]] for (int t = 0; t < TOKENS; t++) {
        [[unroll]] for (int h = 0; h < HELD; h++) {
            float sum = (totals[h * TOKENS + t] + subgroupShuffleXor(totals[h * TOKENS + t], 1)) * UNFOLD;
            uint n = n0 + h * PAIRS;
            if (part == 0 && n < rows && t0 + t < count) result[(t0 + t) * total + first + n] = sum;
        }
    }
}
