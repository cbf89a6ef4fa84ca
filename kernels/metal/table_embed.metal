// embed from a ternary table with a scale for each GROUP of columns: out[m] = (code - 1) * w_scale of row tokens[m].
// One threadgroup of THREADS a token.
#include "table.metal"
#define THREADS 64

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void table_embed(
    device const int *step [[buffer(0)]], constant int &tokens [[buffer(1)]], device const uint *codes [[buffer(2)]],
    device const half *w_scale [[buffer(3)]], device float *out [[buffer(4)]], PLACE) {
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    ulong row = ulong(step[tokens + m]);
    for (int k = 4 * int(index); k < COLS; k += 4 * THREADS) {
        uint word = codes[row * (ROW_BYTES / 4) + ulong(k / 128 * 8 + k % 32 / 4)] >> uint(6 - k % 128 / 32 * 2);
        half scale = w_scale[row * (COLS / GROUP) + ulong(k / GROUP)];
        *(device float4 *)(out + ulong(m) * COLS + ulong(k)) = table_weights(word, scale);
    }
}
