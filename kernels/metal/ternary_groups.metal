// ternary_matmul of weights with a scale for each GROUP of columns: out[m, n] = scale[m] * sum over s of f32(x_s . w_s) * w_scale[n, s].
// The sums of a group are exact, and the terms are added in the order that the contract states, so that the result has its bits.
//
// LANES threads share HELD rows of W. Each takes a unit of columns at a time (one block of 128, or a group of more), and keeps the
// terms of its EACH groups in threadgroup memory, where one thread a row and token adds them up. At each bit pair a chunk of 16 bytes
// holds 16 neighbours of K: pair 3 (the top) of the two chunks of a block weights k..k+31, pair 2 those 32 further, and so on.
// A group's 131,072 products fit a float2.
#define COUNT (COLS / GROUP) /* groups of a row */
#define BLOCKS (GROUP < 128 ? 1 : (GROUP + 127) / 128) /* blocks of a unit */
#define UNITS ((COUNT + EACH - 1) / EACH)
#define ROWS (WG / LANES * HELD)
#define PITCH (COUNT | 1) /* of a row's terms, odd so that neighbours fall into different banks */
#include "ternary_chunk.metal"

[[kernel, max_total_threads_per_threadgroup(WG)]] void ternary_groups(
    device const int *step [[buffer(0)]], device const char *x [[buffer(1)]], device const float *scale [[buffer(2)]],
    device const uint4 *codes [[buffer(3)]], device const half *w_scale [[buffer(4)]], device float *out [[buffer(5)]],
    constant int &rows [[buffer(6)]], PLACE) {
    threadgroup float terms[ROWS * TOKENS * PITCH];
    Place place = PLACED;
    int lane = place.item % LANES, slot = place.item / LANES * HELD, tokens = STEP_TOKENS(step);
    int first = int(group.x) * ROWS, token = int(group.y) * TOKENS;
    if (token >= tokens) return;
    for (int unit = lane; unit < UNITS; unit += LANES) {
        float2 found[HELD][TOKENS][EACH];
        int total[TOKENS][EACH];
        for (int t = 0; t < TOKENS; t++)
            for (int j = 0; j < EACH; j++) {
                total[t][j] = 0;
                for (int r = 0; r < HELD; r++) found[r][t][j] = float2(0.0f, 0.0f);
            }
        for (int b = 0; b < BLOCKS; b++) {
            int block = unit * BLOCKS + b;
            uint4 low[HELD], high[HELD];
            for (int r = 0; r < HELD; r++) {
                ulong row = ulong(min(first + slot + r, rows - 1)) * (ROW_BYTES / 16);
                low[r] = codes[row + ulong(2 * block)];
                high[r] = codes[row + ulong(2 * block + 1)];
            }
            for (int pair = 0; pair < 4; pair++) {
                int j = pair * EACH / 4, k = block * 128 + pair * 32;
                for (int t = 0; t < TOKENS; t++) {
                    device const char *from = x + ulong(min(token + t, tokens - 1)) * COLS;
                    Chunk v = load_x(from, k), w = load_x(from, k + 16);
                    total[t][j] += v.sum + w.sum;
                    for (int r = 0; r < HELD; r++) found[r][t][j] += products(low[r], pair, v) + products(high[r], pair, w);
                }
            }
        }
        for (int r = 0; r < HELD; r++)
            for (int j = 0; j < EACH; j++) {
                int s = unit * EACH + j;
                if (s >= COUNT) continue;
                float w = float(w_scale[ulong(min(first + slot + r, rows - 1)) * COUNT + ulong(s)]);
                for (int t = 0; t < TOKENS; t++) {
                    int sum = int(found[r][t][j].x * UNIT) + int(found[r][t][j].y * UNIT) - total[t][j];
                    terms[((slot + r) * TOKENS + t) * PITCH + s] = float(sum) * w;
                }
            }
    }
    GROUP_BARRIER;
    for (int i = place.item; i < ROWS * TOKENS; i += WG) {
        int m = token + i % TOKENS, to = first + i / TOKENS;
        if (m >= tokens || to >= rows) continue;
        float sum = 0.0f;
        for (int s = 0; s < COUNT; s++) sum += terms[i * PITCH + s];
        float value = sum * scale[m];
        ulong at = ulong(m) * ulong(rows) + ulong(to);
#if ADD
        float before = out[at];
        out[at] = before + value;
#else
        out[at] = value;
#endif
    }
}
