// The token of each of up to 8 rows: scores from the full weights every row of the head that could still win by its rough
// score, exactly as dense_matmul does (the same products in the same order: dense.metal), and takes the greatest. A threadgroup looks
// at EACH * WG rows of the head; head_pick puts what they found together.
#include "dense.metal"
#include "head.metal"
#define NO_NUMBER 0xFFFFFFFFu /* the key of a NaN, which wins over all; 0 is the key of nothing */

// The better of two keys with their tokens: the lower token of equals.
inline uint2 better(uint2 a, uint2 b) { return b.x > a.x || (b.x == a.x && b.y < a.y) ? b : a; }

[[kernel, max_total_threads_per_threadgroup(WG)]] void head_choose(
    device const int *step [[buffer(0)]], device const float2 *size [[buffer(1)]], device const float4 *params [[buffer(2)]],
    device const float *scores [[buffer(3)]], device const uint *state [[buffer(4)]], device const half4 *weight [[buffer(5)]],
    device const float4 *x [[buffer(6)]], device uint2 *found [[buffer(7)]], constant int &rows_at [[buffer(8)]],
    constant int &temperatures [[buffer(9)]], constant int &seeds_lo [[buffer(10)]], constant int &seeds_hi [[buffer(11)]],
    constant int &token_seq [[buffer(12)]], constant int &seq_begin [[buffer(13)]], constant int &seq_len [[buffer(14)]],
    constant int &rows [[buffer(15)]], PLACE) {
    threadgroup uint listed[EACH * WG];
    threadgroup atomic_uint length;
    threadgroup uint2 top[SIMDGROUPS][MAX_ROWS];
    Place place = PLACED;
    ChoiceAt at = {rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len};
    int count = min(STEP_ROWS(step), MAX_ROWS), begin = int(group.x) * (EACH * WG) + place.item;
    if (place.item == 0) atomic_store_explicit(&length, 0u, memory_order_relaxed);
    GROUP_BARRIER;
    for (int i = 0; i < EACH; i++) {
        int n = begin + i * WG;
        if (n >= rows) break;
        bool doubtful = false;
        for (int r = 0; r < count; r++) {
            float4 p = params[r];
            float score = scores[ulong(r) * ulong(rows) + ulong(n)] + (p.z * size[n].x + p.w * size[n].y);
            float key = head_key(head_choice(step, at, r), score, uint(n)), least = key_float(state[r]);
            least -= 1e-5f + 1e-6f * fabs(least);
            doubtful = doubtful || state[r] == 0u || no_number(key) || !(key < least);
        }
        if (doubtful) listed[atomic_fetch_add_explicit(&length, 1u, memory_order_relaxed)] = uint(n);
    }
    GROUP_BARRIER;
    uint all = atomic_load_explicit(&length, memory_order_relaxed);
    uint2 best = uint2(0u, 0xFFFFFFFFu);  // of row `lane`
    for (uint i = uint(place.simdgroup); i < all; i += SIMDGROUPS) {
        uint token = listed[i];
        for (int r = 0; r < count; r++) {
            float sum = 0.0f;
            for (int k = place.lane; k < COLS / 4; k += 32)
                sum = add_products(sum, float4(weight[ulong(token) * (COLS / 4) + ulong(k)]), x[r * (COLS / 4) + k]);
            sum = sum_of_lanes(sum);
            if (place.lane != r) continue;
            float key = head_key(head_choice(step, at, r), sum, token);
            best = better(best, uint2(no_number(key) ? NO_NUMBER : float_key(key), token));
        }
    }
    if (place.lane < MAX_ROWS) top[place.simdgroup][place.lane] = best;
    GROUP_BARRIER;
    if (place.item >= count) return;
    for (int s = 0; s < SIMDGROUPS; s++) best = better(best, top[s][place.item]);
    found[int(group.x) * MAX_ROWS + place.item] = best;
}

// One threadgroup: the tokens, from what `parts` threadgroups of head_choose have found.
[[kernel, max_total_threads_per_threadgroup(WG)]] void head_pick(
    device const int *step [[buffer(0)]], device const uint2 *found [[buffer(1)]], device int *chosen [[buffer(2)]],
    constant int &parts [[buffer(3)]], PLACE) {
    threadgroup uint2 top[WG];
    int item = int(index), count = min(STEP_ROWS(step), MAX_ROWS), r = item % MAX_ROWS;
    uint2 best = uint2(0u, 0xFFFFFFFFu);
    if (r < count)
        for (int g = item / MAX_ROWS; g < parts; g += WG / MAX_ROWS) best = better(best, found[g * MAX_ROWS + r]);
    top[item] = best;
    GROUP_BARRIER;
    if (item >= count) return;
    for (int i = item; i < WG; i += MAX_ROWS) best = better(best, top[i]);
    chosen[item] = best.x == NO_NUMBER ? -1 : best.x != 0u ? int(best.y) : 0;
}
