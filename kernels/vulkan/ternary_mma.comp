// requires: COOPMAT SUBGROUPS
// The product of ternary_matmul for several tokens, on int8 cooperative matrices. A work-group of WM WN WK subgroups of 32 takes BM
// tokens and BN rows of W: WM subgroups share the tokens, WN the rows, WK the columns, of which 128 each are taken at a time, so
// that few tokens still make many work-groups. Codes are expanded to bytes on their way into shared memory; the next blocks'
// loads are in flight while these are multiplied. COLS is a multiple of 16. All places and strides are in 16 bytes.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int ADD = 0;
layout(constant_id = 3) const int TM = 16;  // the device's product: TM tokens, TN rows, TK of K
layout(constant_id = 4) const int TN = 16;
layout(constant_id = 5) const int TK = 32;
layout(constant_id = 6) const int WM = 2;
layout(constant_id = 7) const int WN = 4;
layout(constant_id = 8) const int WK = 1;
layout(constant_id = 9) const int SM = 4;   // products of a subgroup: SM tiles of tokens by SN of rows, at most 4 each
layout(constant_id = 10) const int SN = 2;
layout(constant_id = 11) const int POOL = 2304;  // quads of shared memory: for a block's tiles and, later, a product of each subgroup
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, x);
BUFFER(2, readonly, float, scale);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { int rows; };
const int BM = WM * SM * TM, BN = WN * SN * TN;
const int PITCH = 9;  // 8 and one more, so that rows fall into different banks
const int TILE = (BM + BN) * PITCH;
const int X_LOADS = BM * 8 * WK / WG, CODE_LOADS = (BN * 2 * WK + WG - 1) / WG;  // of an invocation: at most 8 and 4
const uint BLOCKS = (COLS + 127) / 128;
#define SUMS coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>
shared uvec4 tile[POOL];

uvec4 x_at(uint block, uint at, uint m0) {
    uint m = m0 + at / 8, k = block * 8 + at % 8;
    return m < STEP_TOKENS && k < COLS / 16 ? x[m * (COLS / 16) + k] : uvec4(0);
}

uvec4 codes_at(uint block, uint at, uint n0) {
    uint row = n0 + at / 2;
    return row < rows && block < BLOCKS ? codes[(row * BLOCKS + block) * 2 + at % 2] : uvec4(0x55555555u);
}

// Scales and stores the product of each place, the first of which is at m and n.
void store(uint lane, uint m0, uint n0) {
    for (uint i = lane; i < WM * WN * TM * TN; i += WG) {
        uint place = i / (TM * TN), m = m0 + place / WN * (SM * TM) + i / TN % TM, n = n0 + place % WN * (SN * TN) + i % TN;
        if (m >= STEP_TOKENS || n >= rows) continue;
        int sum = 0;
        for (uint k = 0; k < WK; k++) sum += int(tile[(k * (WM * WN * TM * TN) + i) / 4][i % 4]);
        uint at = m * rows + n;
        precise float factor = scale[m] * w_scale[n];
        precise float value = float(sum) * factor;
        if (ADD != 0) {
            precise float total = result[at] + value;
            value = total;
        }
        result[at] = value;
    }
}

KERNEL(ternary_mma) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * BN, m0 = gl_WorkGroupID.y * BM;
    if (m0 >= STEP_TOKENS) return;
    uint my_k = gl_SubgroupID / (WM * WN), mine = gl_SubgroupID % (WM * WN);
    uint my_x = my_k * TILE + mine / WN * (SM * TM) * PITCH, my_w = my_k * TILE + (BM + mine % WN * (SN * TN)) * PITCH;
    SUMS sums[16];  // of the tiles m and n: 4 m + n
#define CLEAR(i) if (i / 4 < SM && i % 4 < SN) sums[i] = SUMS(0);
    REPEAT_16(CLEAR)
    uvec4 next_x[8], next_codes[4];
    uint block = 0;
#define FETCH_X(i) if (i < X_LOADS) next_x[i] = x_at(block + (lane + i * WG) / (BM * 8), (lane + i * WG) % (BM * 8), m0);
#define FETCH_CODES(i) if (i < CODE_LOADS && lane + i * WG < BN * 2 * WK) \
        next_codes[i] = codes_at(block + (lane + i * WG) / (BN * 2), (lane + i * WG) % (BN * 2), n0);
    REPEAT_4(FETCH_CODES)
    REPEAT_8(FETCH_X)
    while (block < BLOCKS) {
        barrier();
#define SHARE_X(i) if (i < X_LOADS) { \
        uint at = (lane + i * WG) % (BM * 8); \
        tile[(lane + i * WG) / (BM * 8) * TILE + at / 8 * PITCH + at % 8] = next_x[i]; \
    }
#define EXPAND(i, plane) tile[to + 2 * plane] = uvec4(weights_of(next_codes[i].x, 3 - plane), weights_of(next_codes[i].y, 3 - plane), \
                                                     weights_of(next_codes[i].z, 3 - plane), weights_of(next_codes[i].w, 3 - plane));
#define SHARE_CODES(i) if (i < CODE_LOADS && lane + i * WG < BN * 2 * WK) { \
        uint at = (lane + i * WG) % (BN * 2), to = (lane + i * WG) / (BN * 2) * TILE + (BM + at / 2) * PITCH + at % 2; \
        EXPAND(i, 0) EXPAND(i, 1) EXPAND(i, 2) EXPAND(i, 3) \
    }
        REPEAT_8(SHARE_X)
        REPEAT_4(SHARE_CODES)
        barrier();
        block += WK;
        if (block < BLOCKS) {
            REPEAT_4(FETCH_CODES)
            REPEAT_8(FETCH_X)
        }
        [[unroll]] for (uint k = 0; k < 8; k += TK / 16) {
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
    }
    // One product of each subgroup at a time goes through shared memory, where those of the same place are added up.
#define STORE(i) if (i / 4 < SM && i % 4 < SN) { \
        barrier(); \
        coopMatStore(sums[i], tile, gl_SubgroupID * (TM * TN / 4), TN / 4, gl_CooperativeMatrixLayoutRowMajor); \
        barrier(); \
        store(lane, m0 + i / 4 * TM, n0 + i % 4 * TN); \
    }
    REPEAT_16(STORE)
}
