// ternary_matmul for many tokens on 8 by 8 matrices: halves hold int8 and weights exactly, and sums of floats are exact below 2^24,
// for up to 65,535 columns. 32 of 128 columns, the weights of one bit pair, are multiplied at a time. Codes become halves as in
// ternary_decode, so sums are multiples of 2^-14. The codes' offset of one adds the sum of x, which is subtracted at the end.
#include "matrix.metal"
#define STAGES (ROW_BYTES / 32)
#define UNIT 16384.0f

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void ternary_gemm_matrix(
    device const int *step [[buffer(0)]], device const char *x [[buffer(1)]], device const float *scale [[buffer(2)]],
    device const int *x_sums [[buffer(3)]], device const uint *codes [[buffer(4)]], device const float *w_scale [[buffer(5)]],
    device float *out [[buffer(6)]], constant int &rows [[buffer(7)]], PLACE) {
    threadgroup float4 memory[TILE_M * OUT_PITCH / 4];  // the tiles of x and W, later that of out
    threadgroup float *pool = (threadgroup float *)memory;
    threadgroup half *x_tile = (threadgroup half *)memory, *w_tile = x_tile + TILE_M * PITCH;
    Place place = PLACED;
    int n0 = int(group.x) * TILE_N, m0 = int(group.y) * TILE_M, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    Sums sums;
    clear(sums);
    for (int stage = 0; stage < STAGES; stage++) {
        // 32 bytes of each row of W: a thread keeps four words of a row, and takes one bit pair after the other from them.
        uint kept[4];
        int row = place.item / 2, half_row = place.item % 2;
        for (int i = 0; i < 4; i++)
            kept[i] = codes[(ulong(min(n0 + row, rows - 1)) * STAGES + ulong(stage)) * 8 + ulong(half_row * 4 + i)];
        for (int pair = 0; pair < 4; pair++) {
            GROUP_BARRIER;
            // Past the last token or row, the last one again; its result is not stored.
            for (int at = place.item; at < TILE_M * 8; at += THREADS) {
                int m = min(m0 + at / 8, tokens - 1), k = stage * 128 + pair * 32 + at % 8 * 4;
                char4 v = k < COLS ? *(device const char4 *)(x + ulong(m) * COLS + ulong(k)) : char4(0);
                *(threadgroup half4 *)(x_tile + at / 8 * PITCH + at % 8 * 4) = half4(v);
            }
            for (int i = 0; i < 4; i++) {
                uint c = kept[i] >> uint(6 - 2 * pair) & 0x03030303u;
                half2 low = as_type<half2>((c << 10 & 0x0C00u) | (c << 18 & 0x0C000000u));
                half2 high = as_type<half2>((c >> 6 & 0x0C00u) | (c << 2 & 0x0C000000u));
                *(threadgroup half4 *)(w_tile + row * PITCH + half_row * 16 + 4 * i) = half4(low, high);
            }
            GROUP_BARRIER;
            multiply<half>(sums, x_tile, w_tile, place);
        }
    }
    spread(sums, pool, place);
    for (int at = place.item; at < TILE_M * TILE_N; at += THREADS) {
        int m = m0 + at / TILE_N, n = n0 + at % TILE_N;
        if (m >= tokens || n >= rows) continue;
        int sum = int(pool[at / TILE_N * OUT_PITCH + at % TILE_N] * UNIT) - x_sums[m];
        float value = float(sum) * (scale[m] * w_scale[n]);
        ulong to = ulong(m) * ulong(rows) + ulong(n);
#if ADD
        float before = out[to];
        out[to] = before + value;
#else
        out[to] = value;
#endif
    }
}
