// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), w in {-1, 0, 1} held as codes w + 1 in two bits.
// A word of codes holds, at each bit pair, four neighbours: pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
// The products are of codes; the sum of x, which the code's offset of one adds too often, is taken off at the end.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` on its own

#define LANES 32
#define WORDS (ROW_BYTES / 4)

inline int dot4(uint codes, uint x, int sum) {
    uchar4 c = as_uchar4(codes);
    char4 v = as_char4(x);
    return sum + c.x * v.x + c.y * v.y + c.z * v.z + c.w * v.w;
}

// Four activations from k on; beyond K, a multiple of 4, they are zero.
inline uint load_x(global const char *row, int k) {
#if COLS % 128 == 0
    return *(global const uint *)(row + k);
#else
    return k < COLS ? *(global const uint *)(row + k) : 0;
#endif
}

inline void store(global float *out, size_t at, int sum, float scale, float w_scale) {
    float value = (float)sum * (scale * w_scale);
#if ADD
    out[at] += value;
#else
    out[at] = value;
#endif
}

// For a few tokens: LANES work-items share a row of W, each work-item TOKENS sums. Group: [LANES, ROWS].
kernel void ternary_gemv(global const int *step, global const char *x, global const float *scale, global const uint *codes,
                         global const float *w_scale, global float *out, int rows) {
    local int scratch[ROWS][TOKENS][LANES];
    int lane = get_local_id(0), group_row = get_local_id(1);
    int n = get_group_id(0) * ROWS + group_row, first = get_group_id(1) * TOKENS;
    int tokens = STEP_TOKENS(step);
    if (first >= tokens) return;
    int sums[TOKENS];
    for (int t = 0; t < TOKENS; t++) sums[t] = 0;
    size_t row = (size_t)min(n, rows - 1) * WORDS;
    for (int w = lane; w < WORDS; w += LANES) {
        uint word = codes[row + w];
        int k = w / 8 * 128 + w % 8 * 4;
        for (int t = 0; t < TOKENS; t++) {
            global const char *from = x + (size_t)min(first + t, tokens - 1) * COLS;
            for (int plane = 0; plane < 4; plane++) {
                uint v = load_x(from, k + 32 * plane);
                sums[t] = dot4((word >> (6 - 2 * plane)) & 0x03030303u, v, sums[t]) - dot4(0x01010101u, v, 0);
            }
        }
    }
    for (int t = 0; t < TOKENS; t++) scratch[group_row][t][lane] = sums[t];
    barrier(CLK_LOCAL_MEM_FENCE);
    // Not a condition on get_local_id(1): PoCL 3.1 takes that for uniform behind a barrier.
    int item = group_row * LANES + lane, to_row = get_group_id(0) * ROWS + item / TOKENS, to = first + item % TOKENS;
    if (item < ROWS * TOKENS && to_row < rows && to < tokens) {
        int sum = 0;
        for (int i = 0; i < LANES; i++) sum += scratch[item / TOKENS][item % TOKENS][i];
        store(out, (size_t)to * rows + to_row, sum, scale[to], w_scale[to_row]);
    }
}

// For many tokens: a tile of TILE_M tokens and TILE_N rows per group of 256, through local memory, 128 of K at a time.
#define TILE_M 32
#define TILE_N 64

kernel void ternary_gemm(global const int *step, global const char *x, global const float *scale, global const uint *codes,
                         global const float *w_scale, global float *out, int rows) {
    local uint x_tile[TILE_M][33];    // 32 words of a token, and one so that tokens fall into different banks
    local uint code_tile[TILE_N][9];  // 8 words of a row, likewise
    int lane = get_local_id(0);
    int n0 = get_group_id(0) * TILE_N, m0 = get_group_id(1) * TILE_M;
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int my_n = lane % 16, my_m = lane / 16;  // rows my_n + 16 i, tokens my_m + 16 j
    int sums[4][2] = {{0}};
    int x_sums[2] = {0};
    for (int block = 0; block < WORDS / 8; block++) {
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < TILE_M * 32; i += 256) {
            int m = m0 + i / 32;
            x_tile[i / 32][i % 32] = m < tokens ? load_x(x + (size_t)m * COLS, block * 128 + i % 32 * 4) : 0;
        }
        for (int i = lane; i < TILE_N * 8; i += 256) {
            int n = n0 + i / 8;
            code_tile[i / 8][i % 8] = n < rows ? codes[(size_t)n * WORDS + block * 8 + i % 8] : 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int j = 0; j < 8; j++) {
            uint word[4];
            for (int i = 0; i < 4; i++) word[i] = code_tile[my_n + 16 * i][j];
            for (int plane = 0; plane < 4; plane++) {
                for (int t = 0; t < 2; t++) {
                    uint v = x_tile[my_m + 16 * t][plane * 8 + j];
                    x_sums[t] = dot4(0x01010101u, v, x_sums[t]);
                    for (int i = 0; i < 4; i++)
                        sums[i][t] = dot4((word[i] >> (6 - 2 * plane)) & 0x03030303u, v, sums[i][t]);
                }
            }
        }
    }
    for (int t = 0; t < 2; t++) {
        int m = m0 + my_m + 16 * t;
        for (int i = 0; i < 4; i++) {
            int n = n0 + my_n + 16 * i;
            if (m < tokens && n < rows) store(out, (size_t)m * rows + n, sums[i][t] - x_sums[t], scale[m], w_scale[n]);
        }
    }
}
