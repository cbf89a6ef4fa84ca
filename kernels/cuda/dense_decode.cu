// dense_matmul of f16 weights for few rows of x: a warp has a weight row at a time, 16 bytes a lane and load, and its lanes keep
// their share of each x in registers, so that nothing but weights moves. Warps go through the weight rows by turns.
#define ITERS (COLS / 8 / WARP) /* COLS is a multiple of 256 */

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
dense_decode(const int *step, const float *x, const uint4 *weight, float *out, int rows) {
    int lane = threadIdx.x % WARP, first = blockIdx.y * TOKENS;
    start_dependents();
    wait_for_before();
    int count = STEP_ROWS(step) - first;
    if (count <= 0) return;
    float mine[TOKENS][ITERS][8];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float4 *from = (const float4 *)(x + (size_t)(first + min(t, count - 1)) * COLS);
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            float4 low = from[(i * WARP + lane) * 2], high = from[(i * WARP + lane) * 2 + 1];
            mine[t][i][0] = low.x, mine[t][i][1] = low.y, mine[t][i][2] = low.z, mine[t][i][3] = low.w;
            mine[t][i][4] = high.x, mine[t][i][5] = high.y, mine[t][i][6] = high.z, mine[t][i][7] = high.w;
        }
    }
    for (int n = blockIdx.x * WARPS + threadIdx.x / WARP; n < rows; n += gridDim.x * WARPS) {
        uint4 w[ITERS];
#pragma unroll
        for (int i = 0; i < ITERS; i++) w[i] = stream(weight + (size_t)n * (COLS / 8) + i * WARP + lane);
        float sums[TOKENS] = {};
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            Eight v = expand(w[i]);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
#pragma unroll
                for (int d = 0; d < 8; d++) sums[t] += mine[t][i][d] * v.v[d];
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float sum = warp_reduce<Sum>(sums[t]);
            if (lane == 0 && t < count) out[(size_t)(first + t) * rows + n] = sum;
        }
    }
}
