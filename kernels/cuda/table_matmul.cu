// dense_matmul of a ternary table with a scale for each GROUP of columns: out[r, n] = x[r] . ((codes[n] - 1) * w_scale[n]), f32 sums.
// LANES threads share EACH rows of the table, and TOKENS rows of x share their read. The codes are as in table_embed.
#include "table.cuh"
#define SLOTS (WG / LANES)

extern "C" __global__ void __launch_bounds__(WG)
table_matmul(const int *step, const float *x, const unsigned *codes, const f16 *w_scale, float *out, int rows) {
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    int first_row = (blockIdx.x * SLOTS + slot) * EACH, first = blockIdx.y * TOKENS, count = STEP_ROWS(step);
    if (first >= count) return;
    float sums[EACH][TOKENS] = {};
    for (int i = lane; i < ROW_BYTES / 4; i += LANES) {
        unsigned word[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) word[e] = codes[(size_t)min(first_row + e, rows - 1) * (ROW_BYTES / 4) + i];
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            int k = i / 8 * 128 + pair * 32 + i % 8 * 4;
            if (k >= COLS) break;
            float4 w[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                float scale = to_float(w_scale[(size_t)min(first_row + e, rows - 1) * (COLS / GROUP) + k / GROUP]);
                w[e] = times(weights_of(word[e] >> (6 - 2 * pair)), scale);
            }
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                float4 v = ((const float4 *)(x + (size_t)min(first + t, count - 1) * COLS))[k / 4];
#pragma unroll
                for (int e = 0; e < EACH; e++) sums[e][t] += (w[e].x * v.x + w[e].y * v.y) + (w[e].z * v.z + w[e].w * v.w);
            }
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float sum = sums[e][t];
            for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(FULL, sum, i);
            if (lane == 0 && first_row + e < rows && first + t < count) out[(size_t)(first + t) * rows + first_row + e] = sum;
        }
    }
}
