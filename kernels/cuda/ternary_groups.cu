// ternary_matmul of weights with a scale for each GROUP of columns: out[m, n] = scale[m] * sum over s of f32(x_s . w_s) * w_scale[n, s].
// The sums of a group are exact, and the terms are added in the order that the contract states, so that the result has its bits.
//
// LANES threads share HELD rows of W. Each takes a unit of columns at a time (one block of 128, or a group of more), and keeps the
// terms of its EACH groups in shared memory, where one thread a row and token adds them up. At each bit pair a chunk of 16 bytes holds
// 16 neighbours of K: pair 3 (the top) of the two chunks of a block weights k..k+31, pair 2 those 32 further, and so on. Codes are
// two's complement: a pair at the top of its byte is 64 times the weight.
#define COUNT (COLS / GROUP) /* groups of a row */
#define BLOCKS (GROUP < 128 ? 1 : (GROUP + 127) / 128) /* blocks of a unit */
#define UNITS ((COUNT + EACH - 1) / EACH)
#define ROWS (WG / LANES * HELD)
#define PITCH (COUNT | 1) /* of a row's terms, odd so that neighbours fall into different banks */

__device__ __forceinline__ int dot4(unsigned codes, unsigned x, int sum) {
    int out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(codes), "r"(x), "r"(sum));
    return out;
}

// 64 times the products of 16 codes, `shift` bits below the top of their bytes, and 16 activations.
__device__ __forceinline__ int dot16(uint4 c, int shift, uint4 x, int sum) {
    sum = dot4(c.x << shift & 0xC0C0C0C0u, x.x, sum);
    sum = dot4(c.y << shift & 0xC0C0C0C0u, x.y, sum);
    sum = dot4(c.z << shift & 0xC0C0C0C0u, x.z, sum);
    return dot4(c.w << shift & 0xC0C0C0C0u, x.w, sum);
}

// Activations k to k + 15 of a row, k a multiple of 16; zero beyond COLS, which is a multiple of 4.
__device__ __forceinline__ uint4 load_x(const signed char *row, int k) {
    const unsigned *words = (const unsigned *)(row + k);
    if (COLS % 16 == 0) return COLS % 128 == 0 || k < COLS ? *(const uint4 *)words : make_uint4(0, 0, 0, 0);
    return make_uint4(k < COLS ? words[0] : 0, k + 4 < COLS ? words[1] : 0, k + 8 < COLS ? words[2] : 0, k + 12 < COLS ? words[3] : 0);
}

extern "C" __global__ void __launch_bounds__(WG)
ternary_groups(const int *step, const signed char *x, const float *scale, const uint4 *codes, const f16 *w_scale, float *out,
               int rows) {
    __shared__ float terms[ROWS * TOKENS * PITCH];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES * HELD, tokens = STEP_TOKENS(step);
    int first = blockIdx.x * ROWS, token = blockIdx.y * TOKENS;
    if (token >= tokens) return;
#pragma unroll 4
    for (int i = 0; i < (UNITS + LANES - 1) / LANES; i++) {
        int unit = lane + i * LANES;
        if (unit >= UNITS) break;
        int found[HELD][TOKENS][EACH] = {};
        for (int b = 0; b < BLOCKS; b++) {
            int block = unit * BLOCKS + b;
            uint4 low[HELD], high[HELD];
#pragma unroll
            for (int r = 0; r < HELD; r++) {
                const uint4 *row = codes + (size_t)min(first + slot + r, rows - 1) * (ROW_BYTES / 16) + 2 * block;
                low[r] = row[0], high[r] = row[1];
            }
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                int j = pair * EACH / 4, k = block * 128 + pair * 32, shift = 2 * pair;
#pragma unroll
                for (int t = 0; t < TOKENS; t++) {
                    const signed char *row = x + (size_t)min(token + t, tokens - 1) * COLS;
                    uint4 v = load_x(row, k), w = load_x(row, k + 16);
#pragma unroll
                    for (int r = 0; r < HELD; r++)
                        found[r][t][j] = dot16(high[r], shift, w, dot16(low[r], shift, v, found[r][t][j]));
                }
            }
        }
#pragma unroll
        for (int r = 0; r < HELD; r++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                int s = unit * EACH + j;
                if (s >= COUNT) continue;
                float w = to_float(w_scale[(size_t)min(first + slot + r, rows - 1) * COUNT + s]);
#pragma unroll
                for (int t = 0; t < TOKENS; t++)
                    terms[((slot + r) * TOKENS + t) * PITCH + s] = __fmul_rn((float)(found[r][t][j] / 64), w);
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += WG) {
        int m = token + i % TOKENS, to = first + i / TOKENS;
        if (m >= tokens || to >= rows) continue;
        float sum = 0.0f;
#pragma unroll 8
        for (int s = 0; s < COUNT; s++) sum = __fadd_rn(sum, terms[i * PITCH + s]);
        float value = __fmul_rn(sum, scale[m]);
        size_t at = (size_t)m * rows + to;
        out[at] = ADD ? __fadd_rn(out[at], value) : value;
    }
}
