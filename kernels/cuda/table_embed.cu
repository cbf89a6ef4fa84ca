// embed from a ternary table with a scale for each GROUP of columns: out[m] = (code - 1) * w_scale of row tokens[m]. One block a token.
// A word of codes has, at each bit pair, four neighbouring columns; the top pair has the first of 128, the next those 32 further, and so on.
#include "table.cuh"

extern "C" __global__ void table_embed(const int *step, int tokens, const unsigned *codes, const f16 *w_scale, float *out) {
    int m = blockIdx.x;
    start_dependents();
    if (m >= STEP_TOKENS(step)) return;
    size_t row = step[tokens + m];
    float4 *to = (float4 *)(out + (size_t)m * COLS);
    for (int k = 4 * threadIdx.x; k < COLS; k += 4 * blockDim.x) {
        unsigned word = codes[row * (ROW_BYTES / 4) + k / 128 * 8 + k % 32 / 4] >> (6 - k % 128 / 32 * 2);
        float scale = to_float(w_scale[row * (COLS / GROUP) + k / GROUP]);
        to[k / 4] = times(weights_of(word), scale);
    }
}
