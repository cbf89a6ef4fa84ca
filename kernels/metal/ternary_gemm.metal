// ternary_matmul for many tokens, without matrices; codes and sums as in ternary_decode. A tile of TY * EACH_M tokens by TX * EACH_N
// rows of W for a threadgroup of TX * TY, each thread EACH_M by EACH_N of it in registers. 128 of K at a time go through
// threadgroup memory.
#define EACH_N 8
#define GROUP (TX * TY)
#define TILE_M (TY * EACH_M)
#define TILE_N (TX * EACH_N)
#define STAGES (ROW_BYTES / 32)
// 16 bytes each: a token's 128 activations and a row's 32 bytes of codes, with room so that neighbours fall into different banks.
#define X_PITCH 9
#define C_PITCH 3

// sum + the products of four codes and four activations.
inline int dot4(uint codes, uint x, int sum) {
    short4 p = short4(as_type<uchar4>(codes)) * short4(as_type<char4>(x));
    return sum + int(p.x) + int(p.y) + int(p.z) + int(p.w);
}

// Activations k to k + 15 of a row of x, k a multiple of 16; zero beyond COLS, which is a multiple of 4.
inline uint4 load_x(device const char *row, int k) {
    device const uint *words = (device const uint *)(row + k);
    return uint4(k < COLS ? words[0] : 0u, k + 4 < COLS ? words[1] : 0u, k + 8 < COLS ? words[2] : 0u, k + 12 < COLS ? words[3] : 0u);
}

[[kernel, max_total_threads_per_threadgroup(GROUP)]] void ternary_gemm(
    device const int *step [[buffer(0)]], device const char *x [[buffer(1)]], device const float *scale [[buffer(2)]],
    device const int *x_sums [[buffer(3)]], device const uint4 *codes [[buffer(4)]], device const float *w_scale [[buffer(5)]],
    device float *out [[buffer(6)]], constant int &rows [[buffer(7)]], PLACE) {
    threadgroup uint4 x_tile[TILE_M * X_PITCH], c_tile[TILE_N * C_PITCH];
    int item = int(index), tx = item % TX, ty = item / TX;
    int n0 = int(group.x) * TILE_N, m0 = int(group.y) * TILE_M, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int sums[EACH_N][EACH_M];
    for (int i = 0; i < EACH_N; i++)
        for (int j = 0; j < EACH_M; j++) sums[i][j] = 0;
    for (int stage = 0; stage < STAGES; stage++) {
        // Past the last token or row, the last one again; its result is not stored.
        for (int at = item; at < TILE_M * 8; at += GROUP)
            x_tile[at / 8 * X_PITCH + at % 8] = load_x(x + ulong(min(m0 + at / 8, tokens - 1)) * COLS, stage * 128 + at % 8 * 16);
        for (int at = item; at < TILE_N * 2; at += GROUP)
            c_tile[at / 2 * C_PITCH + at % 2] = codes[(ulong(min(n0 + at / 2, rows - 1)) * STAGES + ulong(stage)) * 2 + ulong(at % 2)];
        GROUP_BARRIER;
        for (int part = 0; part < 2; part++) {
            uint4 code[EACH_N];
            for (int i = 0; i < EACH_N; i++) code[i] = c_tile[(tx + TX * i) * C_PITCH + part];
            for (int pair = 0; pair < 4; pair++) {
                for (int j = 0; j < EACH_M; j++) {
                    uint4 v = x_tile[(ty + TY * j) * X_PITCH + pair * 2 + part];
                    for (int i = 0; i < EACH_N; i++) {
                        uint4 c = code[i] >> uint(6 - 2 * pair) & 0x03030303u;
                        sums[i][j] = dot4(c.w, v.w, dot4(c.z, v.z, dot4(c.y, v.y, dot4(c.x, v.x, sums[i][j]))));
                    }
                }
            }
        }
        GROUP_BARRIER;
    }
    for (int j = 0; j < EACH_M; j++) {
        int m = m0 + ty + TY * j;
        if (m >= tokens) break;
        for (int i = 0; i < EACH_N; i++) {
            int n = n0 + tx + TX * i;
            if (n >= rows) break;
            float value = float(sums[i][j] - x_sums[m]) * (scale[m] * w_scale[n]);
            ulong to = ulong(m) * ulong(rows) + ulong(n);
#if ADD
            float before = out[to];
            out[to] = before + value;
#else
            out[to] = value;
#endif
        }
    }
}
