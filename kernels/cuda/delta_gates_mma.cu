// delta_gates of many tokens, on the tensor cores, in two launches. A block of the first has 64 tokens, ROWS rows of alpha and beta and a
// share of the columns, 32 at a time; it leaves products and sums of squares. The second puts the SPLITS shares together.
#include "gates.cuh"
#include "tf32.cuh"
#define TOKENS 64
#define ROWS 96 /* of a block; a warp has 16 tokens and SHARE of them */
#define SHARE (ROWS / (WG / WARP / 4))
#define TILES (SHARE / 8)
#define STEP 32
#define STAGES 4
#define LONG 4 /* steps whose products stay in sums of the tensor cores */
#define ALL (TOKENS + ROWS + 1) /* rows in shared memory: of x, of the weights, and of the norm's weight */
#define STAGE (ALL * STEP)

extern "C" __global__ void __launch_bounds__(WG)
delta_gates_mma(const int *step, const float *x, const float *weight, const float *alpha, const float *beta, float *parts, int width,
                int heads, int most) {
    extern __shared__ __align__(128) float ring[];  // [STAGES][ALL][STEP]
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int m0 = blockIdx.x * TOKENS, first_row = blockIdx.y * ROWS, split = blockIdx.z, all = width / STEP, each = (all + SPLITS - 1) / SPLITS;
    int begin = split * each, end = min(all, begin + each);
    start_dependents();
    wait_for_before();
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    // Rows of a pair have their halves exchanged, so that eight lanes read all banks.
    auto fetch = [&](int i) {
        float *to = ring + i % STAGES * STAGE;
        if (i < end) {
#pragma unroll
            for (int j = threadIdx.x; j < STAGE / 4; j += WG) {
                int row = j / 8, piece = j % 8, n = first_row + row - TOKENS;
                bool there = row < TOKENS ? m0 + row < tokens : n < 2 * heads || row == ALL - 1;
                const float *from = row == ALL - 1 ? weight : row < TOKENS ? x + (size_t)(m0 + row) * width : n < heads ? alpha + (size_t)n * width : beta + (size_t)(n - heads) * width;
                copy_async(to + row * STEP + (piece ^ row % 2 * 4) * 4, there ? from + i * STEP + piece * 4 : x, there);
            }
        }
        copies_commit();
    };
    for (int i = 0; i < STAGES - 1; i++) fetch(begin + i);
    int token = warp % 4 * 16 + group, row = warp / 4 * SHARE + group;  // and the token 8 behind, and every 8th row
    float dots[TILES][4] = {}, squared[2] = {};
    Sums3 sums[TILES] = {};
    for (int i = begin; i < end; i++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        fetch(i + STAGES - 1);
        const float *stage = ring + i % STAGES * STAGE;
        auto four = [&](int of, int half) { return *(const float4 *)(stage + of * STEP + ((half ^ of % 2) * 4 + quarter) * 4); };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 gain = four(ALL - 1, half);
            float4 low = four(token, half), high = four(token + 8, half);
            squared[0] += squares(low), squared[1] += squares(high);
            low = times(low, gain), high = times(high, gain);
            SplitTile of[2] = {split_tile({low.x, low.y, high.x, high.y}), split_tile({low.z, low.w, high.z, high.w})};
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                float4 w = four(TOKENS + row + 8 * n, half);
                sums[n].add(of[0], make_float2(w.x, w.y));
                sums[n].add(of[1], make_float2(w.z, w.w));
            }
        }
        if ((i - begin) % LONG == LONG - 1 || i + 1 == end) {
#pragma unroll
            for (int n = 0; n < TILES; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) dots[n][e] += sums[n].of(e);
                sums[n] = {};
            }
        }
    }
    float *to = parts + (size_t)split * most * (2 * heads + 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int m = m0 + token + 8 * half;
        float sum = squared[half];
        sum += __shfl_xor_sync(FULL, sum, 1), sum += __shfl_xor_sync(FULL, sum, 2);
        if (m >= tokens) continue;
        float *own = to + (size_t)m * (2 * heads + 1);
        if (first_row == 0 && warp < 4 && quarter == 0) own[2 * heads] = sum;
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int r = first_row + row - group + 8 * n + 2 * quarter + e;
                if (r < 2 * heads) own[r] = dots[n][2 * half + e];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(WG)
delta_gates_sums(const int *step, const float *parts, float eps, const float *bias, const float *rate, float *out, int width, int heads, int most) {
    int i = blockIdx.x * WG + threadIdx.x, m = i / (2 * heads), row = i % (2 * heads);
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    float sum = 0.0f, dot = 0.0f;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        const float *own = parts + ((size_t)split * most + m) * (2 * heads + 1);
        sum += own[2 * heads], dot += own[row];
    }
    put_gate(out + (size_t)m * 2 * heads, row, dot / sqrtf(sum / width + eps), bias, rate, heads);
}
