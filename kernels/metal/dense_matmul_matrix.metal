// dense_matmul of many rows on 8 by 8 matrices of floats: each row of the head is read once for TILE_M rows of x. A sum depends
// only on its own rows.
#include "matrix.metal"

// Four of the columns of a row, zeros past the last.
template <typename T>
inline float4 columns(device const T *row, int k, int cols) {
    return k < cols ? float4(row[k / 4]) : float4(0.0f);
}

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void dense_matmul_matrix(
    device const int *step [[buffer(0)]], device const float4 *x [[buffer(1)]], device const WEIGHT4 *weight [[buffer(2)]],
    device float *out [[buffer(3)]], constant int &cols [[buffer(4)]], constant int &rows [[buffer(5)]], PLACE) {
    threadgroup float4 memory[(TILE_M + TILE_N) * PITCH / 4];  // the tiles of x and W, later that of out
    threadgroup float *pool = (threadgroup float *)memory, *x_tile = pool, *w_tile = pool + TILE_M * PITCH;
    Place place = PLACED;
    int n0 = int(group.x) * TILE_N, m0 = int(group.y) * TILE_M, count = STEP_ROWS(step);
    if (m0 >= count) return;
    Sums sums;
    clear(sums);
    for (int k = 0; k < cols; k += 32) {
        GROUP_BARRIER;
        // Past the last row, the last one again; its result is not stored.
        for (int at = place.item; at < TILE_M * 8; at += THREADS) {
            ulong m = ulong(min(m0 + at / 8, count - 1));
            *(threadgroup float4 *)(x_tile + at / 8 * PITCH + at % 8 * 4) = columns(x + m * ulong(cols / 4), k + at % 8 * 4, cols);
        }
        for (int at = place.item; at < TILE_N * 8; at += THREADS) {
            ulong n = ulong(min(n0 + at / 8, rows - 1));
            *(threadgroup float4 *)(w_tile + at / 8 * PITCH + at % 8 * 4) = columns(weight + n * ulong(cols / 4), k + at % 8 * 4, cols);
        }
        GROUP_BARRIER;
        multiply<float>(sums, x_tile, w_tile, place);
    }
    spread(sums, pool, place);
    for (int at = place.item; at < TILE_M * TILE_N; at += THREADS) {
        int m = m0 + at / TILE_N, n = n0 + at % TILE_N;
        if (m < count && n < rows) out[ulong(m) * ulong(rows) + ulong(n)] = pool[at / TILE_N * OUT_PITCH + at % TILE_N];
    }
}
