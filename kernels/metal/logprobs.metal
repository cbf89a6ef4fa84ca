// Log-probabilities of each row, of logits as they are: of the chosen token, and of the likeliest ones, as many as the step asks for.
// logprobs_parts finds the likeliest of each share of a row, of EACH * WG logits; logprobs puts what it found together. A part is PITCH
// words: the greatest logit, the sum of e^(z - greatest), then tokens in order, then their logits.
#include "draw.metal"
#define MAX_LOGPROBS 20
#define PITCH (2 + 2 * MAX_LOGPROBS)
#define NONE uint2(0u, 0xFFFFFFFFu)

// A logit's key and its token; the likeliest has the greatest key, and of equals the lowest token.
inline bool before(uint2 a, uint2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
inline bool is_none(uint2 c) { return c.x == 0u && c.y == 0xFFFFFFFFu; }
inline int token_of(uint2 c) { return is_none(c) ? -1 : int(c.y); }
inline float logit_of(uint2 c) { return is_none(c) ? -INFINITY : key_float(c.x); }

// The likeliest of the threadgroup, in every thread.
inline uint2 group_best(uint2 mine, threadgroup uint2 *bests, int lane) {
    GROUP_BARRIER;
    bests[lane] = mine;
    for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
        GROUP_BARRIER;
        if (lane < half_size && before(bests[lane + half_size], bests[lane])) bests[lane] = bests[lane + half_size];
    }
    GROUP_BARRIER;
    return bests[0];
}

[[kernel, max_total_threads_per_threadgroup(WG)]] void logprobs_parts(
    device const int *step [[buffer(0)]], device const float *logits [[buffer(1)]], device int *parts [[buffer(2)]],
    constant int &n [[buffer(3)]], constant int &count [[buffer(4)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    threadgroup uint2 bests[WG];
    Place place = PLACED;
    int r = int(group.y), begin = int(group.x) * EACH * WG + place.item, k = STEP_LOGPROBS(step) - 1;
    if (r >= STEP_ROWS(step)) return;
    device const float *row = logits + ulong(r) * ulong(n);
    device int *part = parts + (ulong(r) * ulong(count) + ulong(group.x)) * PITCH;
    float top = -INFINITY, sum = 0.0f;
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n) top = fmax(top, row[begin + i * WG]);
    top = group_max(top, scratch, place);
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n && row[begin + i * WG] > -INFINITY) sum += precise::exp(row[begin + i * WG] - top);
    sum = group_sum(sum, scratch, place);
    if (place.item == 0) {
        part[0] = as_type<int>(top);
        part[1] = as_type<int>(sum);
    }
    uint2 last = uint2(0xFFFFFFFFu, 0u);
    for (int j = 0; j < k; j++) {
        uint2 mine = NONE;
        for (int i = 0; i < EACH; i++) {
            int v = begin + i * WG;
            if (v >= n) break;
            uint2 c = uint2(float_key(row[v]), uint(v));
            if ((j == 0 || before(last, c)) && before(c, mine)) mine = c;
        }
        last = group_best(mine, bests, place.item);
        if (place.item == 0) {
            part[2 + j] = token_of(last);
            part[2 + MAX_LOGPROBS + j] = as_type<int>(logit_of(last));
        }
    }
}

// A threadgroup a row; there are no more parts than threads.
[[kernel, max_total_threads_per_threadgroup(WG)]] void logprobs(
    device const int *step [[buffer(0)]], device const float *logits [[buffer(1)]], device const int *parts [[buffer(2)]],
    device const int *next [[buffer(3)]], device int *history [[buffer(4)]], constant int &n [[buffer(5)]],
    constant int &count [[buffer(6)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    threadgroup uint2 bests[WG];
    Place place = PLACED;
    int r = int(group.x), t = place.item, k = STEP_LOGPROBS(step) - 1, taken = 0;
    if (r >= STEP_ROWS(step)) return;
    device const int *part = parts + (ulong(r) * ulong(count) + ulong(min(t, count - 1))) * PITCH;
    float top = t < count ? as_type<float>(part[0]) : -INFINITY;
    float greatest = group_max(top, scratch, place);
    float share = t < count && top > -INFINITY ? as_type<float>(part[1]) * precise::exp(top - greatest) : 0.0f;
    float rest = precise::log(group_sum(share, scratch, place));
    device int *out = history + (ulong(STEP_DONE(step)) * ulong(STEP_ROWS(step)) + ulong(r)) * ulong(1 + 2 * k);
    if (t == 0) out[0] = as_type<int>(logits[ulong(r) * ulong(n) + ulong(max(next[r], 0))] - greatest - rest);
    for (int j = 0; j < k; j++) {
        uint2 mine = NONE;
        if (t < count && taken < k && part[2 + taken] >= 0)
            mine = uint2(float_key(as_type<float>(part[2 + MAX_LOGPROBS + taken])), uint(part[2 + taken]));
        uint2 best = group_best(mine, bests, t);
        if (!is_none(mine) && mine.y == best.y) taken++;
        if (t == 0) {
            out[1 + j] = token_of(best);
            out[1 + k + j] = as_type<int>(logit_of(best) - greatest - rest);
        }
    }
}
