// requires: COOPMAT SUBGROUPS
// The product of ternary_matmul for many tokens, on int8 cooperative matrices: a work-group of eight subgroups takes BM tokens
// and 128 rows of W, 128 of K at a time. Codes are expanded to bytes on their way into shared memory; the next block's loads
// are in flight while this one is multiplied. COLS is a multiple of 16. All places and strides are in 16 bytes.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int ADD = 0;
layout(constant_id = 3) const int BM = 128;  // a multiple of 2 TM, at most 128
layout(constant_id = 4) const int TM = 16;   // the device's product: TM tokens, TN rows, TK of K
layout(constant_id = 5) const int TN = 16;
layout(constant_id = 6) const int TK = 32;
layout(constant_id = 7) const int X_LOADS = 4;  // of an invocation: BM * 8 / 256
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, x);
BUFFER(2, readonly, float, scale);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { int rows; };
const int BN = 128, PITCH = 9;  // 8 and one more, so that rows fall into different banks
const uint BLOCKS = (COLS + 127) / 128;
const int SM = BM / 2 / TM, SN = BN / 4 / TN;  // products of a subgroup: two of them share the rows, four the tokens
const int X_TILE = BM * PITCH;
shared uvec4 tile[X_TILE + BN * PITCH];

uvec4 x_at(uint block, uint i, uint m0) {
    uint m = m0 + i / 8, k = block * 8 + i % 8;
    return m < STEP_TOKENS && (COLS % 128 == 0 || k < COLS / 16) ? x[m * (COLS / 16) + k] : uvec4(0);
}

KERNEL(ternary_mma) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * BN, m0 = gl_WorkGroupID.y * BM;
    if (m0 >= STEP_TOKENS) return;
    uint my_m = gl_SubgroupID / 4 * (BM / 2), my_n = gl_SubgroupID % 4 * (BN / 4);
    uint row = n0 + lane / 2;
    coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator> sums[SM * SN];
    for (int i = 0; i < SM * SN; i++) sums[i] = coopmat<int, gl_ScopeSubgroup, TM, TN, gl_MatrixUseAccumulator>(0);
    uvec4 next_x[X_LOADS];
    [[unroll]] for (int i = 0; i < X_LOADS; i++) next_x[i] = x_at(0, lane + i * 256, m0);
    uvec4 next_codes = row < rows ? codes[row * BLOCKS * 2 + lane % 2] : uvec4(0x55555555u);
    for (uint block = 0; block < BLOCKS; block++) {
        barrier();
        [[unroll]] for (int i = 0; i < X_LOADS; i++) {
            uint at = lane + i * 256;
            tile[at / 8 * PITCH + at % 8] = next_x[i];
        }
        [[unroll]] for (int plane = 0; plane < 4; plane++) {
            uvec4 words;
            [[unroll]] for (int j = 0; j < 4; j++) words[j] = weights_of(next_codes[j], 3 - plane);
            tile[X_TILE + lane / 2 * PITCH + plane * 2 + lane % 2] = words;
        }
        barrier();
        if (block + 1 < BLOCKS) {
            [[unroll]] for (int i = 0; i < X_LOADS; i++) next_x[i] = x_at(block + 1, lane + i * 256, m0);
            if (row < rows) next_codes = codes[(row * BLOCKS + block + 1) * 2 + lane % 2];
        }
        for (uint k = 0; k < 8; k += TK / 16) {
            coopmat<int8_t, gl_ScopeSubgroup, TK, TN, gl_MatrixUseB> weights[SN];
            for (int n = 0; n < SN; n++)
                coopMatLoad(weights[n], tile, X_TILE + (my_n + n * TN) * PITCH + k, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
            for (int m = 0; m < SM; m++) {
                coopmat<int8_t, gl_ScopeSubgroup, TM, TK, gl_MatrixUseA> tokens;
                coopMatLoad(tokens, tile, (my_m + m * TM) * PITCH + k, PITCH, gl_CooperativeMatrixLayoutRowMajor);
                for (int n = 0; n < SN; n++) sums[m * SN + n] = coopMatMulAdd(tokens, weights[n], sums[m * SN + n]);
            }
        }
    }
    // Each subgroup passes its sums through its own part of the shared memory: TM rows of TN / 4 quads.
    barrier();
    uint own = gl_SubgroupID * (TM * TN / 4);
    for (int i = 0; i < SM * SN; i++) {
        subgroupBarrier();
        coopMatStore(sums[i], tile, own, TN / 4, gl_CooperativeMatrixLayoutRowMajor);
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        for (uint j = gl_SubgroupInvocationID; j < TM * TN; j += gl_SubgroupSize) {
            uint m = m0 + my_m + i / SN * TM + j / TN, n = n0 + my_n + i % SN * TN + j % TN;
            if (m < STEP_TOKENS && n < rows) {
                uint at = m * rows + n;
                precise float factor = scale[m] * w_scale[n];
                precise float value = float(int(tile[own + j / 4][j % 4])) * factor;
                if (ADD != 0) {
                    precise float total = result[at] + value;
                    value = total;
                }
                result[at] = value;
            }
        }
    }
}
