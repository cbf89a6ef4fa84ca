// requires: SUBGROUPS
// variants: DOT
// Scores of all rows of a compact head, roughly, for up to 8 rows of x, and for each of these the greatest key that its winner
// reaches for certain. LANES invocations share four rows of the head at a time, whose loads are in flight together.
//
// FILTERED: counts the rows of the head by their u, too, for the only row of x (filter.glsl).
layout(constant_id = 1) const int COLS = 32;  // a multiple of 32
layout(constant_id = 2) const int TOKENS = 1;
layout(constant_id = 3) const int LANES = 8;  // at least 8
layout(constant_id = 4) const int TURNS = 1;
layout(constant_id = 5) const int FILTERED = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, codes);
BUFFER(2, readonly, vec2, size);
BUFFER(3, readonly, uvec4, planes);
BUFFER(4, readonly, vec4, params);
BUFFER(5, writeonly, float, scores);
BUFFER(6, , uint, state);
layout(push_constant) uniform Push { int rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len, top_ks, top_ps, min_ps, rows; };
#include "head.glsl"
const int CHUNKS = COLS / 32, EACH = (CHUNKS + LANES - 1) / LANES;  // of 32 columns; of an invocation
const int MINE = (4 * TOKENS + LANES - 1) / LANES;  // scores of an invocation
shared uvec4 pool[TOKENS * 4 * CHUNKS];
shared uint reached[TOKENS];
shared uint counted[1 + FILTERED * (BINS - 1)];
shared uint peak;

int product(uvec4 a, uvec4 b, int sum) {
    sum = dot4(a.x, b.x, sum);
    sum = dot4(a.y, b.y, sum);
    sum = dot4(a.z, b.z, sum);
    return dot4(a.w, b.w, sum);
}

KERNEL(head_score) {
    uint lane = LANE, part = lane % LANES, count = TOKENS == 1 ? 1 : STEP_ROWS;
    vec4 p[4];
    Choice choice[4];
    float greatest[4];
#define CHOOSE(m) if (m < MINE) { \
        uint r = min((part + m * LANES) / 4, count - 1); \
        p[m] = params[r]; \
        choice[m] = head_choice(r); \
        greatest[m] = -INFINITY; \
    }
    REPEAT_4(CHOOSE)
    if (lane < TOKENS) reached[lane] = 0;
    Filter f;
    uint greatest_size = 0;
    if (FILTERED != 0) {
        f = row_filter(0, rows);
        for (uint i = lane; i < BINS; i += WG) counted[i] = 0;
        if (lane == 0) peak = 0;
    }
    for (uint turn = 0; turn < TURNS; turn++) {
        uint n = ((gl_WorkGroupID.x * TURNS + turn) * (WG / LANES) + lane / LANES) * 4;
        vec2 sizes = size[SIZES_AT + min(n + part % 4, rows - 1)];
        uvec4 words[4][8];
        int sums[4 * TOKENS];
        [[unroll]] for (int s = 0; s < 4 * TOKENS; s++) sums[s] = 0;
        for (uint base = part; base < part + CHUNKS; base += 8 * LANES) {
#define FETCH(i) if (i < EACH) { \
            uint chunk = min(base + i * LANES, CHUNKS - 1); \
            words[0][i] = codes[CODES_AT + min(n, rows - 1) * CHUNKS + chunk]; \
            words[1][i] = codes[CODES_AT + min(n + 1, rows - 1) * CHUNKS + chunk]; \
            words[2][i] = codes[CODES_AT + min(n + 2, rows - 1) * CHUNKS + chunk]; \
            words[3][i] = codes[CODES_AT + min(n + 3, rows - 1) * CHUNKS + chunk]; \
        }
            REPEAT_8(FETCH)
            if (turn == 0 && base == part) {  // while the first are on their way
                for (uint i = lane; i < TOKENS * 4 * CHUNKS; i += WG) pool[i] = planes[i];
                barrier();
            }
#define ADD_ROW(j, i) { \
                uvec4 a = words[j][i] & 0x0F0F0F0Fu, b = words[j][i] >> 4 & 0x0F0F0F0Fu; \
                sums[4 * t + j] += 256 * product(b, high_b, product(a, high_a, 0)) + product(b, low_b, product(a, low_a, 0)); \
            }
#define MULTIPLY(i) if (i < EACH && base + i * LANES < CHUNKS) { \
            [[unroll]] for (int t = 0; t < TOKENS; t++) { \
                uint at = 4 * t * CHUNKS + base + i * LANES; \
                uvec4 high_a = pool[at], high_b = pool[at + CHUNKS], low_a = pool[at + 2 * CHUNKS], low_b = pool[at + 3 * CHUNKS]; \
                ADD_ROW(0, i) ADD_ROW(1, i) ADD_ROW(2, i) ADD_ROW(3, i) \
            } \
        }
            REPEAT_8(MULTIPLY)
        }
        int mine[4];
        [[unroll]] for (int s = 0; s < 4 * TOKENS; s++) {
            int sum = sums[s];
            for (uint apart = LANES / 2; apart > 0; apart /= 2) sum += subgroupShuffleXor(sum, apart);
            if (part == s % LANES) mine[s / LANES] = sum;
        }
        // The high bytes count 256-fold: below 2^31 for up to 4,096 columns.
#define SCORE(m) if (m < MINE) { \
            uint s = part + m * LANES, r = s / 4, at = n + s % 4; \
            if (s < 4 * TOKENS && r < count && at < rows) { \
                float score = (float(mine[m]) - p[m].y) * p[m].x * sizes.x, doubt = p[m].z * sizes.x + p[m].w * sizes.y; \
                scores[r * rows + at] = score; \
                greatest[m] = max(greatest[m], head_key(choice[m], score - doubt, at)); \
                if (FILTERED != 0 && f.on) { \
                    float u = log_size(f, score * choice[m].inverse, (score + RAISED * doubt) * choice[m].inverse); \
                    atomicAdd(counted[bin_of(u)], 1); \
                    greatest_size = max(greatest_size, float_key(u)); \
                } \
            } \
        }
        REPEAT_4(SCORE)
    }
#define REACH(m) if (m < MINE && part + m * LANES < 4 * TOKENS) atomicMax(reached[(part + m * LANES) / 4], float_key(greatest[m]));
    REPEAT_4(REACH)
    if (FILTERED != 0 && greatest_size != 0) atomicMax(peak, greatest_size);
    barrier();
    if (lane < min(TOKENS, count)) atomicMax(state[lane], reached[lane]);
    if (FILTERED == 0 || !f.on) return;
    for (uint i = lane; i < BINS; i += WG)
        if (counted[i] != 0) atomicAdd(state[STATE_BINS + i], counted[i]);
    if (lane == 0) atomicMax(state[STATE_PEAK], peak);
}
