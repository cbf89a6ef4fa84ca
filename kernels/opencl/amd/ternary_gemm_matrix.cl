// ternary_gemm on the matrix units; codes and sums as in ternary_decode. A group has BM tokens by BN rows of W, WAVES_M by WAVES_N waves of
// TM by TN tiles of 16 by 16. 128 of K at a time go through one of two buffers in local memory while the next are on their way to
// registers: one barrier for each. A lane takes its part of the 32 bytes of a row's codes, one bit pair (a plane of 32 of K) after the
// other, and the same part of the activations that go with the plane.
//
// With a scale for each GROUP of 64, 128 or 256 columns, codes are signed. A lane has one row of each of its tiles, so one scale of a
// group; it is asked for with the codes, and the group's sums become terms as soon as they are complete.
#ifdef GROUP
#define SIGNED true
#endif
#include "amd/matrix.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product, and the sum of terms and of `add`, separately
#ifdef GROUP
#include "groups.clh"
#include "group_terms.clh"
#define SETS (GROUP < 128 ? 128 / GROUP : 1) /* groups of a stage */
#define RUNS (GROUP > 128 ? GROUP / 128 : 1) /* stages of a group */
#define BYTES_OF(code, plane) TOP_PAIRS(code, plane)
typedef half row_unit;
#else
#define START 0
#define BYTES_OF(code, plane) ((code) >> (6 - 2 * (plane)) & 0x03030303u)
typedef float row_unit;
#endif

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
    global const uint4 *codes, global const row_unit *w_scale, global float *out, int rows) {
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
        for (int j = 0; j < TN; j++) sums[i][j] = (sums16)(START);
    uint4 next_x[X_LOADS], next_c[C_LOADS];
#ifdef GROUP
    float totals[TM][TN][D_ROWS], units[TN][SETS], next_units[TN][SETS];
    UNROLL
    for (int i = 0; i < TM * TN * D_ROWS; i++) totals[i / TN / D_ROWS][i / D_ROWS % TN][i % D_ROWS] = 0.0f;
#endif
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
#ifdef GROUP
            UNROLL
            for (int j = 0; j < TN; j++)
                UNROLL
                for (int s = 0; s < SETS; s++) {
                    size_t n = min(n0 + wave_n + j * 16 + line, rows - 1);
                    next_units[j][s] = (float)w_scale[n * COUNT + min((stage + 1) / RUNS * SETS + s, COUNT - 1)];
                }
#endif
        }
        if (stage >= 0) {
            local const uint4 *from_x = x_tile[stage % 2], *from_c = c_tile[stage % 2];
            unit code[TN][UNITS];
            UNROLL
            for (int j = 0; j < TN; j++)
                UNROLL
                for (int u = 0; u < UNITS; u++) {
                    code[j][u] = UNIT_AT(from_c, (wave_n + j * 16 + line) * C_PITCH, part * UNITS + u);
#ifdef GROUP
                    code[j][u] = SIGNED_CODES(code[j][u]);
#endif
                }
            UNROLL
            for (int plane = 0; plane < 4; plane += PLANES) {
                unit c[TN][PLANES * UNITS];
                UNROLL
                for (int j = 0; j < TN; j++)
                    UNROLL
                    for (int u = 0; u < PLANES * UNITS; u++) c[j][u] = BYTES_OF(code[j][u % UNITS], plane + u / UNITS);
                UNROLL
                for (int i = 0; i < TM; i++) {
                    unit v[PLANES * UNITS];
                    UNROLL
                    for (int u = 0; u < PLANES * UNITS; u++)
                        v[u] = UNIT_AT(from_x, (wave_m + i * 16 + line) * X_PITCH + (plane + u / UNITS) * 2, part * UNITS + u % UNITS);
                    UNROLL
                    for (int j = 0; j < TN; j++) sums[i][j] = multiplied(v, c[j], sums[i][j]);
                }
#ifdef GROUP
                if ((plane + PLANES) % (4 / SETS) || (stage + 1) % RUNS) continue;
                UNROLL
                for (int i = 0; i < TM; i++)
                    UNROLL
                    for (int j = 0; j < TN; j++) {
                        UNROLL
                        for (int r = 0; r < D_ROWS; r++)
                            totals[i][j][r] = add_term(totals[i][j][r], sums[i][j][r], units[j][plane * SETS / 4]);
                        sums[i][j] = (sums16)(START);
                    }
#endif
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
#ifdef GROUP
        UNROLL
        for (int j = 0; j < TN * SETS; j++) units[j / SETS][j % SETS] = next_units[j / SETS][j % SETS];
#endif
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#ifndef GROUP
    float row_scale[TN];
    UNROLL
    for (int j = 0; j < TN; j++) row_scale[j] = w_scale[min(n0 + wave_n + j * 16 + line, rows - 1)];
#endif
    UNROLL
    for (int i = 0; i < TM; i++) {
        UNROLL
        for (int r = 0; r < D_ROWS; r++) {
            int m = m0 + wave_m + i * 16 + D_ROW(r, lane);
            if (m >= tokens) continue;
            float x_scale = scale[m];
            UNROLL
            for (int j = 0; j < TN; j++) {
                int n = n0 + wave_n + j * 16 + line;
                if (n >= rows) continue;
#ifdef GROUP
                float value = totals[i][j][r] * UNFOLD * x_scale;
#else
                float value = (float)(sums[i][j][r] - x_sums[m]) * (x_scale * row_scale[j]);
#endif
#if ADD
                out[(size_t)m * rows + n] += value;
#else
                out[(size_t)m * rows + n] = value;
#endif
            }
        }
    }
}
