// dense_matmul of a ternary table with a scale for each GROUP of columns: out[r, n] = x[r] . ((codes[n] - 1) * w_scale[n]), f32 sums.
// LANES threads of a simdgroup share EACH rows of the table, and TOKENS rows of x share one read of them. A sum depends on neither.
#include "table.metal"
#include "dense.metal"
#define WORDS (ROW_BYTES / 4)
#define GROUP_ROWS (WG / LANES * EACH)

[[kernel, max_total_threads_per_threadgroup(WG)]] void table_matmul(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device const uint *codes [[buffer(2)]],
    device const half *w_scale [[buffer(3)]], device float *out [[buffer(4)]], constant int &rows [[buffer(5)]], PLACE) {
    int lane = int(index) % LANES, first = int(group.y) * TOKENS, count = STEP_ROWS(step);
    int first_row = int(group.x) * GROUP_ROWS + int(index) / LANES * EACH;
    if (first >= count) return;
    float sums[EACH][TOKENS];
    for (int e = 0; e < EACH; e++)
        for (int t = 0; t < TOKENS; t++) sums[e][t] = 0.0f;
    for (int i = lane; i < WORDS; i += LANES) {
        uint word[EACH];
        for (int e = 0; e < EACH; e++) word[e] = codes[ulong(min(first_row + e, rows - 1)) * WORDS + ulong(i)];
        for (int pair = 0; pair < 4; pair++) {
            int k = i / 8 * 128 + pair * 32 + i % 8 * 4;
            if (k >= COLS) break;
            float4 w[EACH];
            for (int e = 0; e < EACH; e++) {
                half scale = w_scale[ulong(min(first_row + e, rows - 1)) * (COLS / GROUP) + ulong(k / GROUP)];
                w[e] = table_weights(word[e] >> uint(6 - 2 * pair), scale);
            }
            for (int t = 0; t < TOKENS; t++) {
                float4 v = *(device const float4 *)(x + ulong(min(first + t, count - 1)) * COLS + ulong(k));
                for (int e = 0; e < EACH; e++) sums[e][t] = add_products(sums[e][t], w[e], v);
            }
        }
    }
    for (int e = 0; e < EACH; e++) {
        for (int t = 0; t < TOKENS; t++) {
            float sum = sums[e][t];
            for (ushort apart = LANES / 2; apart > 0; apart /= 2) sum += simd_shuffle_xor(sum, apart);
            int to_row = first_row + e, to = first + t;
            if (lane == 0 && to_row < rows && to < count) out[ulong(to) * ulong(rows) + ulong(to_row)] = sum;
        }
    }
}
