// requires: COOPMAT SUBGROUPS
// The product of weights with a scale for each group of columns for several tokens, on int8 cooperative matrices: work-groups, tiles and
// loads as in ternary_mma. A group's sums become floats, are multiplied with a matrix that has the rows' scales in each of its lines, and
// are added to a sum of floats, each rounded, in the order of the groups. COLS is a multiple of 16.
//
// With WK = 1 the sums of floats are matrices, too. Else WK subgroups have a block of 128 columns each, SM and SN are 1, a group is
// 64 or 128 columns, and the terms go through shared memory, where an invocation adds those of its two places.
layout(constant_id = 6) const int TM = 16;  // the device's product: TM tokens, TN rows, TK of K
layout(constant_id = 7) const int TN = 16;
layout(constant_id = 8) const int TK = 32;
layout(constant_id = 9) const int WM = 2;
layout(constant_id = 10) const int WN = 4;
layout(constant_id = 11) const int WK = 1;
layout(constant_id = 12) const int SM = 4;  // products of a subgroup: SM tiles of tokens by SN of rows, at most 4 each
layout(constant_id = 13) const int SN = 2;
layout(constant_id = 14) const int POOL = 2304;  // quads of shared memory: for a block's tiles and, later, a product of each subgroup
layout(constant_id = 15) const int TERMS = 1;    // quads of shared memory for terms
#define WIDE 1
#include "ternary_group.glsl"
const int BM = WM * SM * TM, BN = WN * SN * TN;
const int PITCH = 9;  // 8 and one more, so that rows fall into different banks
const int TILE = (BM + BN) * PITCH;
const int X_LOADS = BM * 8 * WK / WG, CODE_LOADS = (BN * 2 * WK + WG - 1) / WG;  // of an invocation: at most 8 and 4
const uint WHOLE = (COLS + 127) / 128;  // blocks of a row
const uint SETS = EACH;                 // groups of a block
const uint ROUNDS = (WHOLE + WK - 1) / WK;
#define SUMS coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>
#define TOTALS coopmat<float, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>
#define FLOATS_OF(sums) TOTALS(sums)
#define PRODUCT(a, b) ((a) * (b))
#define TOTAL(a, b) ((a) + (b))
shared uvec4 tile[POOL];
shared vec4 units[WK * SETS * BN / 4];
shared vec4 terms[TERMS];

uvec4 x_at(uint block, uint at, uint m0) {
    uint m = m0 + at / 8, k = block * 8 + at % 8;
    return m < STEP_TOKENS && k < COLS / 16 ? x[m * (COLS / 16) + k] : uvec4(0);
}

uvec4 codes_at(uint block, uint at, uint n0) {
    uint row = n0 + at / 2;
    return row < rows && block < WHOLE ? codes[(row * WHOLE + block) * 2 + at % 2] : uvec4(0x55555555u);
}

// The scale of row n0 + at % BN in set at / BN of the blocks from `block` on; 0 where there is none.
float unit_at(uint block, uint at, uint n0) {
    uint n = n0 + at % BN, set = at / BN, s = (block + set / SETS) / BLOCKS * SETS + set % SETS;
    if (n >= rows || s >= COUNT) return 0.0;
    uint place = (first + n) * COUNT + s;
    vec2 pair = unpackHalf2x16(w_scale[place / 2]);
    return place % 2 == 0 ? pair.x : pair.y;
}

KERNEL(ternary_groups_mma) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * BN, m0 = gl_WorkGroupID.y * BM;
    if (m0 >= STEP_TOKENS) return;
    uint my_k = gl_SubgroupID / (WM * WN), mine = gl_SubgroupID % (WM * WN);
    uint my_x = my_k * TILE + mine / WN * (SM * TM) * PITCH, my_w = my_k * TILE + (BM + mine % WN * (SN * TN)) * PITCH;
    uint my_units = my_k * SETS * (BN / 4) + mine % WN * (SN * TN / 4);
    SUMS sums[16];  // of the tiles m and n: 4 m + n
    TOTALS total[16];
    float added[2] = float[2](0.0, 0.0);  // with several WK: of this invocation's places
#define CLEAR(i) if (i / 4 < SM && i % 4 < SN) { sums[i] = SUMS(0); total[i] = TOTALS(0.0); }
    REPEAT_16(CLEAR)
    uvec4 next_x[8], next_codes[4];
    float next_units[4];
#define FETCH_X(i) if (i < X_LOADS) next_x[i] = x_at(block + (lane + i * WG) / (BM * 8), (lane + i * WG) % (BM * 8), m0);
#define FETCH_CODES(i) if (i < CODE_LOADS && lane + i * WG < BN * 2 * WK) \
        next_codes[i] = codes_at(block + (lane + i * WG) / (BN * 2), (lane + i * WG) % (BN * 2), n0);
#define FETCH_UNITS(i) if (lane + i * WG < WK * SETS * BN) next_units[i] = unit_at(block, lane + i * WG, n0);
    uint block = 0;
    REPEAT_4(FETCH_CODES)
    REPEAT_8(FETCH_X)
    REPEAT_4(FETCH_UNITS)
    for (uint round = 0; round < ROUNDS; round++) {
        barrier();
#define SHARE_X(i) if (i < X_LOADS) { \
        uint at = (lane + i * WG) % (BM * 8); \
        tile[(lane + i * WG) / (BM * 8) * TILE + at / 8 * PITCH + at % 8] = next_x[i]; \
    }
#define EXPAND(i, plane) tile[to + 2 * plane] = plane_of(next_codes[i], plane);
#define SHARE_CODES(i) if (i < CODE_LOADS && lane + i * WG < BN * 2 * WK) { \
        uint at = (lane + i * WG) % (BN * 2), to = (lane + i * WG) / (BN * 2) * TILE + (BM + at / 2) * PITCH + at % 2; \
        EXPAND(i, 0) EXPAND(i, 1) EXPAND(i, 2) EXPAND(i, 3) \
    }
#define SHARE_UNITS(i) if (lane + i * WG < WK * SETS * BN) units[(lane + i * WG) / 4][(lane + i * WG) % 4] = next_units[i];
        REPEAT_8(SHARE_X)
        REPEAT_4(SHARE_CODES)
        REPEAT_4(SHARE_UNITS)
        barrier();
        uint now = block + my_k;
        block += WK;
        if (block < WHOLE) {
            REPEAT_4(FETCH_CODES)
            REPEAT_8(FETCH_X)
            REPEAT_4(FETCH_UNITS)
        }
        [[unroll]] for (uint set = 0; set < SETS; set++) {
            [[unroll]] for (uint k = set * (8 / SETS); k < (set + 1) * (8 / SETS); k += TK / 16) {
                coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB> weights[4];
                coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA> tokens;
#define LOAD_WEIGHTS(n) if (n < SN) \
        coopMatLoad(weights[n], tile, my_w + n * TN * PITCH + k, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
#define MULTIPLY(m, n) if (n < SN) sums[4 * m + n] = coopMatMulAdd(tokens, weights[n], sums[4 * m + n]);
#define MULTIPLY_TOKENS(m) if (m < SM) { \
        coopMatLoad(tokens, tile, my_x + m * TM * PITCH + k, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        MULTIPLY(m, 0) MULTIPLY(m, 1) MULTIPLY(m, 2) MULTIPLY(m, 3) \
    }
                REPEAT_4(LOAD_WEIGHTS)
                REPEAT_4(MULTIPLY_TOKENS)
            }
            if (WK == 1 && (now + 1) % BLOCKS != 0 && now + 1 < WHOLE) continue;
            TOTALS scale_of;
#define END_GROUP(m, n) if (m < SM && n < SN) { \
        precise TOTALS term = PRODUCT(FLOATS_OF(sums[4 * m + n]), scale_of); \
        sums[4 * m + n] = SUMS(0); \
        if (WK == 1) { \
            precise TOTALS sum = TOTAL(total[4 * m + n], term); \
            total[4 * m + n] = sum; \
        } else { \
            coopMatStore(term, terms, ((my_k * SETS + set) * (WM * WN) + mine) * (TM * TN / 4), TN / 4, gl_CooperativeMatrixLayoutRowMajor); \
        } \
    }
#define END_GROUPS(n) if (n < SN) { \
        coopMatLoad(scale_of, units, my_units + set * (BN / 4) + n * (TN / 4), 0, gl_CooperativeMatrixLayoutRowMajor); \
        END_GROUP(0, n) END_GROUP(1, n) END_GROUP(2, n) END_GROUP(3, n) \
    }
            REPEAT_4(END_GROUPS)
        }
        if (WK > 1) {
            barrier();
            [[unroll]] for (uint i = 0; i < 2; i++) {
                uint at = lane + i * WG;
                if (at >= WM * WN * TM * TN) continue;
                precise float sum = added[i];
                for (uint g = 0; g < WK * SETS; g++)
                    if (round * WK * SETS + g < COUNT) sum += terms[(g * (WM * WN * TM * TN) + at) / 4][at % 4];
                added[i] = sum;
            }
        }
    }
    if (WK > 1) {
        [[unroll]] for (uint i = 0; i < 2; i++) {
            uint at = lane + i * WG, place = at / (TM * TN);
            uint m = m0 + place / WN * TM + at / TN % TM, n = n0 + place % WN * TN + at % TN;
            if (at < WM * WN * TM * TN && m < STEP_TOKENS && n < rows) store(m, n, added[i]);
        }
        return;
    }
    // One product of each subgroup at a time goes through shared memory.
#define STORE(i) if (i / 4 < SM && i % 4 < SN) { \
        barrier(); \
        coopMatStore(total[i], tile, gl_SubgroupID * (TM * TN / 4), TN / 4, gl_CooperativeMatrixLayoutRowMajor); \
        barrier(); \
        for (uint j = lane; j < WM * WN * TM * TN; j += WG) { \
            uint place = j / (TM * TN), m = m0 + place / WN * (SM * TM) + i / 4 * TM + j / TN % TM; \
            uint n = n0 + place % WN * (SN * TN) + i % 4 * TN + j % TN; \
            if (m < STEP_TOKENS && n < rows) store(m, n, uintBitsToFloat(tile[j / 4][j % 4])); \
        } \
    }
    REPEAT_16(STORE)
}
