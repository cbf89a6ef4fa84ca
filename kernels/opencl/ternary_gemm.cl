// ternary_matmul for many tokens; codes and sums as in ternary_decode. A tile of TY * EACH_M tokens by TX * EACH_N rows of W for a
// group of TX * TY, each work-item EACH_M by EACH_N of it in registers. 128 of K at a time go through one of two buffers in local
// memory while the next are on their way to registers: one barrier for each.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately

#define EACH_N 8
#define GROUP (TX * TY)
#define TILE_M (TY * EACH_M)
#define TILE_N (TX * EACH_N)
#define STAGES (ROW_BYTES / 32)
// 16 bytes each: a token's 128 activations and a row's 32 bytes of codes, with room so that neighbours fall into different banks.
#define X_PITCH 9
#define C_PITCH 3
#define X_LOADS ((TILE_M * 8 + GROUP - 1) / GROUP)
#define C_LOADS ((TILE_N * 2 + GROUP - 1) / GROUP)

kernel __attribute__((reqd_work_group_size(GROUP, 1, 1))) void ternary_gemm(
    global const int *step, global const char *x, global const float *scale, global const int *x_sums,
    global const uint4 *codes, global const float *w_scale, global float *out, int rows) {
    local uint4 x_tile[2][TILE_M * X_PITCH], c_tile[2][TILE_N * C_PITCH];
    int item = get_local_id(0), tx = item % TX, ty = item / TX;
    int n0 = get_group_id(0) * TILE_N, m0 = get_group_id(1) * TILE_M, tokens = STEP_TOKENS(step);
    // Not a return: PoCL 3.1 lets all work-items into the conditions behind the barriers then.
    int stages = m0 < tokens ? STAGES : -1;
    int sums[EACH_N][EACH_M];
    UNROLL
    for (int i = 0; i < EACH_N; i++)
        UNROLL
        for (int j = 0; j < EACH_M; j++) sums[i][j] = 0;
    uint4 next_x[X_LOADS], next_c[C_LOADS];
    for (int stage = -1; stage < stages; stage++) {
        if (stage + 1 < STAGES) {
            // Past the last token or row, the last one again; its result is not stored.
            UNROLL
            for (int i = 0; i < X_LOADS; i++) {
                int at = item + i * GROUP;
                if (at < TILE_M * 8) next_x[i] = load_x(x, min(m0 + at / 8, tokens - 1), (stage + 1) * 128 + at % 8 * 16);
            }
            UNROLL
            for (int i = 0; i < C_LOADS; i++) {
                int at = item + i * GROUP;
                if (at < TILE_N * 2) next_c[i] = codes[((size_t)min(n0 + at / 2, rows - 1) * STAGES + stage + 1) * 2 + at % 2];
            }
        }
        if (stage >= 0) {
            local const uint4 *from_x = x_tile[stage % 2], *from_c = c_tile[stage % 2];
            UNROLL
            for (int part = 0; part < 2; part++) {
                uint4 code[EACH_N];
                UNROLL
                for (int i = 0; i < EACH_N; i++) code[i] = from_c[(tx + TX * i) * C_PITCH + part];
                UNROLL
                for (int pair = 0; pair < 4; pair++) {
                    uint4 c[EACH_N];
                    UNROLL
                    for (int i = 0; i < EACH_N; i++) c[i] = code[i] >> (6 - 2 * pair) & 0x03030303u;
                    UNROLL
                    for (int j = 0; j < EACH_M; j++) {
                        uint4 v = from_x[(ty + TY * j) * X_PITCH + pair * 2 + part];
                        UNROLL
                        for (int i = 0; i < EACH_N; i++)
                            sums[i][j] = dot4(c[i].w, v.w, dot4(c[i].z, v.z, dot4(c[i].y, v.y, dot4(c[i].x, v.x, sums[i][j]))));
                    }
                }
            }
        }
        if (stage + 1 < STAGES) {
            UNROLL
            for (int i = 0; i < X_LOADS; i++) {
                int at = item + i * GROUP;
                if (at < TILE_M * 8) x_tile[(stage + 1) % 2][at / 8 * X_PITCH + at % 8] = next_x[i];
            }
            UNROLL
            for (int i = 0; i < C_LOADS; i++) {
                int at = item + i * GROUP;
                if (at < TILE_N * 2) c_tile[(stage + 1) % 2][at / 2 * C_PITCH + at % 2] = next_c[i];
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    UNROLL
    for (int j = 0; j < EACH_M; j++) {
        int m = m0 + ty + TY * j;
        if (m >= tokens) break;
        UNROLL
        for (int i = 0; i < EACH_N; i++) {
            int n = n0 + tx + TX * i;
            if (n >= rows) break;
            float value = (float)(sums[i][j] - x_sums[m]) * (scale[m] * w_scale[n]);
#if ADD
            out[(size_t)m * rows + n] += value;
#else
            out[(size_t)m * rows + n] = value;
#endif
        }
    }
}
