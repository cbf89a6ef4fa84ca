// ternary_matmul of weights with a scale for each GROUP of columns: out[m, n] = scale[m] * sum over s of f32(x_s . w_s) * w_scale[n, s].
// The sums of a group are exact, and the terms are added in the order that the contract states, so that the result has its bits.
//
// LANES work-items share HELD rows of W. Each takes a unit of columns at a time (one block of 128, or a group of more), and keeps the
// terms of its EACH groups in local memory, where one work-item a row and token adds them up. At each bit pair a chunk of 16 bytes holds
// 16 neighbours of K: pair 3 (the top) of the two chunks of a block weights k..k+31, pair 2 those 32 further, and so on.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and each sum separately

#define COUNT (COLS / GROUP) /* groups of a row */
#define BLOCKS (GROUP < 128 ? 1 : (GROUP + 127) / 128) /* blocks of a unit */
#define UNITS ((COUNT + EACH - 1) / EACH)
#define ROWS (WG / LANES * HELD)
#define PITCH (COUNT / 2 * 2 + 1) /* of a row's terms, odd so that neighbours fall into different banks */

// AT_ONCE: tokens that a work-item multiplies together. Intel's GPUs lack registers for the sums of more tokens: on Gen9 where bytes
// are multiplied one by one, and on Gen12 for 8 tokens with groups of 32.
#if INTEL && !INT_DOT
#define AT_ONCE 1
#elif INTEL
#define AT_ONCE (TOKENS / (1 + TOKENS * EACH / 32)) /* half of them where they are 8 and EACH is 4 */
#else
#define AT_ONCE TOKENS
#endif

// The products of 16 codes and 16 activations.
inline int dot16(uint4 c, uint4 x, int sum) {
    return dot4(c.w, x.w, dot4(c.z, x.z, dot4(c.y, x.y, dot4(c.x, x.x, sum))));
}

kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void ternary_groups(
    global const int *step, global const char *x, global const float *scale, global const uint4 *codes,
    global const half *w_scale, global float *out, int rows) {
    local float terms[ROWS * TOKENS * PITCH];
    int item = get_local_id(0), lane = item % LANES, slot = item / LANES * HELD, tokens = STEP_TOKENS(step);
    int first = get_group_id(0) * ROWS, token = get_group_id(1) * TOKENS;
    if (token >= tokens) return;
    for (int part = 0; part < TOKENS; part += AT_ONCE) {
        UNROLL_BY_8
        for (int i = 0; i < (UNITS + LANES - 1) / LANES; i++) {
            int unit = lane + i * LANES;
            if (unit >= UNITS) break;
            int found[HELD][AT_ONCE][EACH], total[AT_ONCE][EACH];
            UNROLL
            for (int t = 0; t < AT_ONCE; t++)
                UNROLL
                for (int j = 0; j < EACH; j++) {
                    total[t][j] = 0;
                    UNROLL
                    for (int r = 0; r < HELD; r++) found[r][t][j] = 0;
                }
            for (int b = 0; b < BLOCKS; b++) {
                int block = unit * BLOCKS + b;
                uint4 low[HELD], high[HELD];
                UNROLL
                for (int r = 0; r < HELD; r++) {
                    global const uint4 *row = codes + (size_t)min(first + slot + r, rows - 1) * (ROW_BYTES / 16) + 2 * block;
                    low[r] = row[0], high[r] = row[1];
                }
                UNROLL
                for (int pair = 0; pair < 4; pair++) {
                    int j = pair * EACH / 4, k = block * 128 + pair * 32;
                    UNROLL
                    for (int t = 0; t < AT_ONCE; t++) {
                        size_t m = min(token + part + t, tokens - 1);
                        uint4 v = load_x(x, m, k), w = load_x(x, m, k + 16);
                        total[t][j] = dot16((uint4)(0x01010101u), w, dot16((uint4)(0x01010101u), v, total[t][j]));
                        UNROLL
                        for (int r = 0; r < HELD; r++) {
                            uint4 c = low[r] >> (6 - 2 * pair) & 0x03030303u, d = high[r] >> (6 - 2 * pair) & 0x03030303u;
                            found[r][t][j] = dot16(d, w, dot16(c, v, found[r][t][j]));
                        }
                    }
                }
            }
            UNROLL
            for (int r = 0; r < HELD; r++)
                UNROLL
                for (int j = 0; j < EACH; j++) {
                    int s = unit * EACH + j;
                    if (s >= COUNT) continue;
                    float w = vload_half((size_t)min(first + slot + r, rows - 1) * COUNT + s, w_scale);
                    UNROLL
                    for (int t = 0; t < AT_ONCE; t++) terms[((slot + r) * TOKENS + part + t) * PITCH + s] = (float)(found[r][t][j] - total[t][j]) * w;
                }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < ROWS * TOKENS; i += WG) {
        int m = token + i % TOKENS, to = first + i / TOKENS;
        if (m >= tokens || to >= rows) continue;
        float sum = 0.0f;
        for (int s = 0; s < COUNT; s++) sum += terms[i * PITCH + s];
        float value = sum * scale[m];
#if ADD
        out[(size_t)m * rows + to] += value;
#else
        out[(size_t)m * rows + to] = value;
#endif
    }
}
