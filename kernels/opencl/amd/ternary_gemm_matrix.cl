// ternary_gemm on the matrix units; codes and sums as in ternary_decode. A group has BM tokens by BN rows of W, WAVES_M by WAVES_N waves of
// TM by TN tiles of 16 by 16. 128 of K at a time go through one of two buffers in local memory while the next are on their way to
// registers: one barrier for each. A lane takes its part of the 32 bytes of a row's codes, one bit pair (a plane of 32 of K) after the
// other, and the same part of the activations that go with the plane.
#include "amd/matrix.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately

#define THREADS (MATRIX_WAVE * WAVES_M * WAVES_N)
#define BM (16 * TM * WAVES_M)
#define BN (16 * TN * WAVES_N)
#define STAGES (ROW_BYTES / 32)
// 16 bytes each: a token's 128 activations and a row's 32 bytes of codes, with room so that neighbours fall into different banks.
#define X_PITCH 9
#define C_PITCH 3
#define X_LOADS ((BM * 8 + THREADS - 1) / THREADS)
#define C_LOADS ((BN * 2 + THREADS - 1) / THREADS)
#define UNIT_AT(from, at, i) (((local const unit *)((from) + (at)))[i])

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WAVES void ternary_gemm_matrix(
    global const int *step, global const char *x, global const float *scale, global const int *x_sums,
    global const uint4 *codes, global const float *w_scale, global float *out, int rows) {
    local uint4 x_tile[2][BM * X_PITCH], c_tile[2][BN * C_PITCH];
    int item = get_local_id(0), wave = item / MATRIX_WAVE, lane = item % MATRIX_WAVE;
    int line = lane % 16, part = PARTS == 1 ? 0 : lane / 16;
    int wave_m = wave % WAVES_M * TM * 16, wave_n = wave / WAVES_M * TN * 16;
    int n0 = get_group_id(0) * BN, m0 = get_group_id(1) * BM, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    sums16 sums[TM][TN];
    UNROLL
    for (int i = 0; i < TM; i++)
        UNROLL
        for (int j = 0; j < TN; j++) sums[i][j] = (sums16)(0);
    uint4 next_x[X_LOADS], next_c[C_LOADS];
    _Pragma("unroll 1")
    for (int stage = -1; stage < STAGES; stage++) {
        if (stage + 1 < STAGES) {
            // Past the last token or row, the last one again; its result is not stored.
            UNROLL
            for (int i = 0; i < X_LOADS; i++) {
                int at = item + i * THREADS;
                if (BM * 8 % THREADS == 0 || at < BM * 8) next_x[i] = load_x(x, min(m0 + at / 8, tokens - 1), (stage + 1) * 128 + at % 8 * 16);
            }
            UNROLL
            for (int i = 0; i < C_LOADS; i++) {
                int at = item + i * THREADS;
                if (BN * 2 % THREADS == 0 || at < BN * 2) next_c[i] = codes[((size_t)min(n0 + at / 2, rows - 1) * STAGES + stage + 1) * 2 + at % 2];
            }
        }
        if (stage >= 0) {
            local const uint4 *from_x = x_tile[stage % 2], *from_c = c_tile[stage % 2];
            unit code[TN][UNITS];
            UNROLL
            for (int j = 0; j < TN; j++)
                UNROLL
                for (int u = 0; u < UNITS; u++) code[j][u] = UNIT_AT(from_c, (wave_n + j * 16 + line) * C_PITCH, part * UNITS + u);
            UNROLL
            for (int plane = 0; plane < 4; plane += PLANES) {
                unit c[TN][PLANES * UNITS];
                UNROLL
                for (int j = 0; j < TN; j++)
                    UNROLL
                    for (int u = 0; u < PLANES * UNITS; u++) c[j][u] = code[j][u % UNITS] >> (6 - 2 * (plane + u / UNITS)) & 0x03030303u;
                UNROLL
                for (int i = 0; i < TM; i++) {
                    unit v[PLANES * UNITS];
                    UNROLL
                    for (int u = 0; u < PLANES * UNITS; u++)
                        v[u] = UNIT_AT(from_x, (wave_m + i * 16 + line) * X_PITCH + (plane + u / UNITS) * 2, part * UNITS + u % UNITS);
                    UNROLL
                    for (int j = 0; j < TN; j++) sums[i][j] = multiplied(v, c[j], sums[i][j]);
                }
            }
        }
        if (stage + 1 < STAGES) {
            UNROLL
            for (int i = 0; i < X_LOADS; i++) {
                int at = item + i * THREADS;
                if (BM * 8 % THREADS == 0 || at < BM * 8) x_tile[(stage + 1) % 2][at / 8 * X_PITCH + at % 8] = next_x[i];
            }
            UNROLL
            for (int i = 0; i < C_LOADS; i++) {
                int at = item + i * THREADS;
                if (BN * 2 % THREADS == 0 || at < BN * 2) c_tile[(stage + 1) % 2][at / 2 * C_PITCH + at % 2] = next_c[i];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float row_scale[TN];
    UNROLL
    for (int j = 0; j < TN; j++) row_scale[j] = w_scale[min(n0 + wave_n + j * 16 + line, rows - 1)];
    UNROLL
    for (int i = 0; i < TM; i++) {
        UNROLL
        for (int r = 0; r < D_ROWS; r++) {
            int m = m0 + wave_m + i * 16 + D_ROW(r, lane);
            if (m >= tokens) continue;
            int x_sum = x_sums[m];
            float x_scale = scale[m];
            UNROLL
            for (int j = 0; j < TN; j++) {
                int n = n0 + wave_n + j * 16 + line;
                if (n >= rows) continue;
                float value = (float)(sums[i][j][r] - x_sum) * (x_scale * row_scale[j]);
#if ADD
                out[(size_t)m * rows + n] += value;
#else
                out[(size_t)m * rows + n] = value;
#endif
            }
        }
    }
}
