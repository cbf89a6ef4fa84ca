// variants: SUBGROUPS DOT WIDE
// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]). A word of codes holds, at each bit pair, four neighbours:
// pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int ADD = 0;
#if ENTRY_ternary_gemv
layout(constant_id = 3) const int LANES = 4;
layout(constant_id = 4) const int TOKENS = 1;
#endif
const uint BLOCKS = (COLS + 127) / 128;
BUFFER(0, readonly, int, step_data);
#if WIDE
BUFFER(1, readonly, uvec4, x);  // COLS is a multiple of 16
#else
BUFFER(1, readonly, uint, x);
#endif
BUFFER(2, readonly, float, scale);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { int rows; };

// Four words of a token's activations, the quad-th; zeros beyond K.
uvec4 load_x(uint m, uint quad) {
#if WIDE
    return COLS % 128 == 0 || quad < COLS / 16 ? x[m * (COLS / 16) + quad] : uvec4(0);
#else
    uvec4 words;
    [[unroll]] for (uint j = 0; j < 4; j++)
        words[j] = 4 * quad + j < COLS / 4 ? x[m * (COLS / 4) + 4 * quad + j] : 0;
    return words;
#endif
}

void store(uint m, uint n, int sum) {
    uint at = m * rows + n;
    precise float factor = scale[m] * w_scale[n];
    precise float value = float(sum) * factor;
    if (ADD != 0) {
        precise float total = result[at] + value;
        value = total;
    }
    result[at] = value;
}

#if ENTRY_ternary_gemv
// For a few tokens: LANES invocations share a row of W, each has TOKENS sums.
#if !SUBGROUPS
shared int partial[TOKENS * WG];
#endif

KERNEL(ternary_gemv) {
    uint lane = LANE, part = lane % LANES, n = gl_WorkGroupID.x * (WG / LANES) + lane / LANES;
    uint first = gl_WorkGroupID.y * TOKENS, tokens = STEP_TOKENS;
    if (first >= tokens) return;
    uint row = min(n, rows - 1) * BLOCKS * 2;
    int sums[TOKENS];
    [[unroll]] for (int t = 0; t < TOKENS; t++) sums[t] = 0;
    for (uint q = part; q < BLOCKS * 2; q += LANES) {
        uvec4 quad = codes[row + q];
        [[unroll]] for (int plane = 0; plane < 4; plane++) {
            uvec4 weights;
            [[unroll]] for (int j = 0; j < 4; j++) weights[j] = weights_of(quad[j], 3 - plane);
            [[unroll]] for (uint t = 0; t < TOKENS; t++) {
                uvec4 v = load_x(min(first + t, tokens - 1), q / 2 * 8 + q % 2 + 2 * plane);
                [[unroll]] for (int j = 0; j < 4; j++) sums[t] = dot4(weights[j], v[j], sums[t]);
            }
        }
    }
#if SUBGROUPS
    for (int t = 0; t < TOKENS; t++) {
        int sum = sums[t];
        for (uint apart = LANES / 2; apart > 0; apart /= 2) sum += subgroupShuffleXor(sum, apart);
        if (part == t % LANES && n < rows && first + t < tokens) store(first + t, n, sum);
    }
#else
    for (int t = 0; t < TOKENS; t++) partial[t * WG + lane] = sums[t];
    barrier();
    for (uint t = part; t < TOKENS; t += LANES) {
        int sum = 0;
        for (uint i = 0; i < LANES; i++) sum += partial[t * WG + lane - part + i];
        if (n < rows && first + t < tokens) store(first + t, n, sum);
    }
#endif
}
#else
// For many tokens: a tile of TILE_M tokens and TILE_N rows per group of 128, through shared memory, 128 of K at a time.
const int TILE_M = 32, TILE_N = 64;
shared uint x_tile[TILE_M * 33];    // 32 words of a token, and one so that tokens fall into different banks
shared uint code_tile[TILE_N * 9];  // 8 words of a row, likewise

KERNEL(ternary_gemm) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * TILE_N, m0 = gl_WorkGroupID.y * TILE_M, tokens = STEP_TOKENS;
    if (m0 >= tokens) return;
    uint my_n = lane % 16, my_m = lane / 16;  // rows my_n + 16 i, tokens my_m + 8 t
    int sums[16];
    [[unroll]] for (int i = 0; i < 16; i++) sums[i] = 0;
    for (uint block = 0; block < BLOCKS; block++) {
        barrier();
        for (uint i = lane; i < TILE_M * 8; i += 128) {
            uint m = m0 + i / 8;
            uvec4 v = m < tokens ? load_x(m, block * 8 + i % 8) : uvec4(0);
            [[unroll]] for (uint j = 0; j < 4; j++) x_tile[i / 8 * 33 + i % 8 * 4 + j] = v[j];
        }
        uint n = n0 + lane / 2;
        uvec4 quad = n < rows ? codes[(n * BLOCKS + block) * 2 + lane % 2] : uvec4(0x55555555u);
        [[unroll]] for (int j = 0; j < 4; j++) code_tile[lane / 2 * 9 + lane % 2 * 4 + j] = quad[j];
        barrier();
        for (uint j = 0; j < 8; j++) {
            uint word[4];
            [[unroll]] for (int i = 0; i < 4; i++) word[i] = code_tile[(my_n + 16 * i) * 9 + j];
            [[unroll]] for (int plane = 0; plane < 4; plane++) {
                uint v[4];
                [[unroll]] for (int t = 0; t < 4; t++) v[t] = x_tile[(my_m + 8 * t) * 33 + plane * 8 + j];
                [[unroll]] for (int i = 0; i < 4; i++) {
                    uint weights = weights_of(word[i], 3 - plane);
                    [[unroll]] for (int t = 0; t < 4; t++) sums[4 * i + t] = dot4(weights, v[t], sums[4 * i + t]);
                }
            }
        }
    }
    [[unroll]] for (int t = 0; t < 4; t++)
        [[unroll]] for (int i = 0; i < 4; i++) {
            uint m = m0 + my_m + 8 * t, n = n0 + my_n + 16 * i;
            if (m < tokens && n < rows) store(m, n, sums[4 * i + t]);
        }
}
#endif
