// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), w in {-1, 0, 1} held as codes w + 1 in two bits.
// A word of codes holds, at each bit pair, four neighbours: pair 3 (the top) weights k..k+3, pair 2 those 32 further, and so on.
// Codes are multiplied, not weights; their offset of one adds the sum of x, which is subtracted at the end.
#define WORDS (ROW_BYTES / 4)
#define ONES 0x01010101
#define LOW_PAIRS 0x03030303u

__device__ __forceinline__ int dot4(unsigned codes, int x, int sum) {
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(codes), "r"(x), "r"(sum));
    return out;
}

// Four activations from k on; beyond K, a multiple of 4, they are zero.
__device__ __forceinline__ int load_x(const signed char *row, int k) {
    return COLS % 128 == 0 || k < COLS ? *(const int *)(row + k) : 0;
}

// The contract rounds the sum of `add` separately.
__device__ __forceinline__ void store(float *out, size_t at, int sum, float scale, float w_scale) {
    float value = dequantize(sum, scale, w_scale);
    out[at] = ADD ? __fadd_rn(out[at], value) : value;
}

// For a few tokens: a warp has a row of W, and a sum for each of TOKENS. Block: [32, ROWS].
extern "C" __global__ void ternary_gemv(const int *step, const signed char *x, const float *scale, const unsigned *codes,
                                        const unit_t *w_scale, float *out, int rows) {
    int lane = threadIdx.x, n = blockIdx.x * ROWS + threadIdx.y, first = blockIdx.y * TOKENS;
    int tokens = STEP_TOKENS(step);
    if (first >= tokens || n >= rows) return;
    int sums[TOKENS] = {};
    for (int w = lane; w < WORDS; w += WARP) {
        unsigned word = codes[(size_t)n * WORDS + w];
        int k = w / 8 * 128 + w % 8 * 4;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const signed char *row = x + (size_t)min(first + t, tokens - 1) * COLS;
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
                int v = load_x(row, k + 32 * plane);
                sums[t] = dot4((word >> (6 - 2 * plane)) & LOW_PAIRS, v, sums[t]) - dot4(ONES, v, 0);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        for (int i = WARP / 2; i > 0; i /= 2) sums[t] += __shfl_xor_sync(FULL, sums[t], i);
        if (lane == 0 && first + t < tokens)
            store(out, (size_t)(first + t) * rows + n, sums[t], scale[first + t], to_float(w_scale[n]));
    }
}

// For many tokens: a tile of TILE_M tokens and TILE_N rows per block of 256, through shared memory, 128 of K at a time.
#define TILE_M 32
#define TILE_N 64

extern "C" __global__ void ternary_gemm(const int *step, const signed char *x, const float *scale, const unsigned *codes,
                                        const unit_t *w_scale, float *out, int rows) {
    __shared__ int x_tile[TILE_M][33];         // 32 words of a token, and one so that tokens fall into different banks
    __shared__ unsigned code_tile[TILE_N][9];  // 8 words of a row, likewise
    int lane = threadIdx.x, n0 = blockIdx.x * TILE_N, m0 = blockIdx.y * TILE_M;
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int my_n = lane % 16, my_m = lane / 16;  // rows my_n + 16 i, tokens my_m + 16 j
    int sums[4][2] = {}, x_sums[2] = {};
    for (int block = 0; block < WORDS / 8; block++) {
        __syncthreads();
        for (int i = lane; i < TILE_M * 32; i += 256) {
            int m = m0 + i / 32;
            x_tile[i / 32][i % 32] = m < tokens ? load_x(x + (size_t)m * COLS, block * 128 + i % 32 * 4) : 0;
        }
        for (int i = lane; i < TILE_N * 8; i += 256) {
            int n = n0 + i / 8;
            code_tile[i / 8][i % 8] = n < rows ? codes[(size_t)n * WORDS + block * 8 + i % 8] : 0;
        }
        __syncthreads();
        for (int j = 0; j < 8; j++) {
            unsigned word[4];
            for (int i = 0; i < 4; i++) word[i] = code_tile[my_n + 16 * i][j];
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
                for (int t = 0; t < 2; t++) {
                    int v = x_tile[my_m + 16 * t][plane * 8 + j];
                    x_sums[t] = dot4(ONES, v, x_sums[t]);
                    for (int i = 0; i < 4; i++)
                        sums[i][t] = dot4((word[i] >> (6 - 2 * plane)) & LOW_PAIRS, v, sums[i][t]);
                }
            }
        }
    }
    for (int t = 0; t < 2; t++) {
        int m = m0 + my_m + 16 * t;
        for (int i = 0; i < 4; i++) {
            int n = n0 + my_n + 16 * i;
            if (m < tokens && n < rows) store(out, (size_t)m * rows + n, sums[i][t] - x_sums[t], scale[m], to_float(w_scale[n]));
        }
    }
}
