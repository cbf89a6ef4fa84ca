// variants: SUBGROUPS
// One work-group chooses the token of one row. The threshold of top-k is found by bisection over the order-preserving integer form
// of floats, so that no sort is needed and ties are all kept. That of top-p is not looked for: a token is drawn from all, and
// stays if the more likely ones have less than the wanted mass; else only those are left, and another is drawn (decision 0026).
#include "draw.glsl"
layout(constant_id = 1) const int GATE = 2;  // as dense_decode has it
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, logits);
BUFFER(2, writeonly, int, chosen);
BUFFER(3, readonly, uint, gate);
layout(push_constant) uniform Push {
    int rows, temperatures, top_ks, top_ps, min_ps, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len, n;
};
shared float best_value[WG];
shared int best_index[WG];

// Logits of a row over the temperature: eight of an invocation at a time, all of them on their way together.
float held[8];
#define HOLD(i) held[i] = at + i * WG < n ? logits[row + at + i * WG] * inverse : -INFINITY;
#define HOLD_LOGITS REPEAT_8(HOLD)

// Sum over tokens with key >= least: of 1, or of e^(z - top).
float measure(uint row, float inverse, uint least, bool mass, float top) {
    float sum = 0.0;
    for (int at = LANE; at < n; at += 8 * WG) {
        HOLD_LOGITS
#define MEASURE(i) if (at + i * WG < n && float_key(held[i]) >= least) sum += mass ? exp(held[i] - top) : 1.0;
        REPEAT_8(MEASURE)
    }
    return group_sum_max(sum, 0.0).x;
}

// The greatest key that so many tokens reach.
uint threshold(uint row, float inverse, float wanted) {
    uint low = 0, high = 0xFFFFFFFFu;
    while (low < high) {
        uint middle = low + (high - low) / 2 + 1;
        float count = measure(row, inverse, middle, false, 0.0);
        if (count >= wanted) low = middle;
        else high = middle - 1;
        if (count == wanted) break;
    }
    return low;
}

KERNEL(sample) {
    int r = int(gl_WorkGroupID.x), lane = LANE;
    if (r >= STEP_ROWS || gate[GATE] == 0) return;
    uint row = r * uint(n);
    float temperature = intBitsToFloat(step_data[temperatures + r]);
    bool greedy = temperature == 0.0;
    float inverse = greedy ? 1.0 : 1.0 / temperature;
    uint least = 0, position = 0;
    float floor_z = -INFINITY, top = -INFINITY, top_p = 1.0, wanted = 0.0;
    if (!greedy) {
        position = TOKEN_POSITION(step_data[rows + r]) + 1;
        for (int at = lane; at < n; at += 8 * WG) {
            HOLD_LOGITS
#define LOOK(i) top = max(top, held[i]);
            REPEAT_8(LOOK)
        }
        top = group_sum_max(0.0, top).y;
        int top_k = step_data[top_ks + r];
        float min_p = intBitsToFloat(step_data[min_ps + r]);
        top_p = intBitsToFloat(step_data[top_ps + r]);
        if (top_k > 0 && top_k < n) least = threshold(row, inverse, float(top_k));
        if (top_p < 1.0) wanted = top_p * measure(row, inverse, least, true, top);
        if (min_p > 0.0) floor_z = top + log(min_p);
    }
    for (;;) {
        float best = -INFINITY;
        int index = n;
        if (greedy) {
            for (int at = lane; at < n; at += 8 * WG) {
                HOLD_LOGITS
#define CHOOSE(i) if (at + i * WG < n && no_number(held[i])) index = -1; \
                else if (at + i * WG < n && index >= 0 && (held[i] > best || index == n)) { best = held[i]; index = at + i * WG; }
                REPEAT_8(CHOOSE)
            }
        } else {
            for (int first = 4 * lane; first < n; first += 4 * WG) {
                vec4 z;
                bvec4 left;  // of these tokens
#define LEFT(i) { \
                z[i] = logits[row + min(first + i, n - 1)] * inverse; \
                left[i] = first + i < n && float_key(z[i]) >= least && !(z[i] < floor_z); \
                if (no_number(z[i])) index = -1; \
            }
                REPEAT_4(LEFT)
                if (index < 0 || !any(left)) continue;
                uvec4 words = noise_words(uint(step_data[seeds_lo + r]), uint(step_data[seeds_hi + r]), uint(first), position, 0);
#define OFFER(i) if (left[i]) { \
                float key = z[i] + gumbel_of(words[i]); \
                if (key > best || index == n) { best = key; index = first + i; } \
            }
                REPEAT_4(OFFER)
            }
        }
        best_value[lane] = best;
        best_index[lane] = index;
        for (int count = WG; count > 1;) {
            int upper = (count + 1) / 2;
            barrier();
            if (lane + upper < count) {
                float other = best_value[lane + upper];
                int other_index = best_index[lane + upper], mine = best_index[lane];
                if (mine >= 0 && other_index < n && (other_index < 0 || mine == n || other > best_value[lane] ||
                                                     (other == best_value[lane] && other_index < mine))) {
                    best_value[lane] = other;
                    best_index[lane] = other_index;
                }
            }
            count = upper;
        }
        barrier();
        int token = best_index[0];
        if (top_p >= 1.0 || token < 0 || token >= n) break;
        uint more = float_key(logits[row + token] * inverse) + 1;
        float mass = measure(row, inverse, more, true, top);  // of the tokens more likely than the chosen one
        if (mass == 0.0 || !(mass >= wanted)) break;
        least = more;
    }
    if (lane == 0) chosen[r] = best_index[0];
}
