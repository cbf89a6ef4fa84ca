// Log-probabilities of each row, of logits as they are: of the chosen token, and of the likeliest ones, as many as the step asks for.
// logprobs_parts finds the likeliest of each share of a row, of EACH * WG logits; logprobs puts what it found together. A part is PITCH
// words: the greatest logit, the sum of e^(z - greatest), then tokens in order, then their logits.
#include "draw.glsl"
layout(constant_id = 1) const int EACH = 8;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, logits);
#if ENTRY_logprobs_parts
BUFFER(2, writeonly, int, parts);
#else
BUFFER(2, readonly, int, parts);
BUFFER(3, readonly, int, next);
BUFFER(4, writeonly, int, history);
#endif
layout(push_constant) uniform Push { int n, count; };
const int MAX_LOGPROBS = 20, PITCH = 2 + 2 * MAX_LOGPROBS;
// A logit's key and its token; the likeliest has the greatest key, and of equals the lowest token.
const uvec2 NONE = uvec2(0, 0xFFFFFFFFu);
shared uvec2 bests[WG];

bool before(uvec2 a, uvec2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
int token_of(uvec2 c) { return c == NONE ? -1 : int(c.y); }
float logit_of(uvec2 c) { return c == NONE ? -INFINITY : key_float(c.x); }

// The likeliest of the work-group, in every invocation.
uvec2 group_best(uvec2 mine) {
    int lane = LANE;
    barrier();
    bests[lane] = mine;
    for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
        barrier();
        if (lane < half_size && before(bests[lane + half_size], bests[lane])) bests[lane] = bests[lane + half_size];
    }
    barrier();
    return bests[0];
}

#if ENTRY_logprobs_parts
KERNEL(logprobs_parts) {
    uint r = gl_WorkGroupID.y, begin = gl_WorkGroupID.x * EACH * WG + LANE, row = r * uint(n);
    if (int(r) >= STEP_ROWS) return;
    int k = STEP_LOGPROBS - 1;
    uint part = (r * count + gl_WorkGroupID.x) * PITCH;
    float top = -INFINITY, sum = 0.0;
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n) top = max(top, logits[row + begin + i * WG]);
    top = group_sum_max(0.0, top).y;
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n && logits[row + begin + i * WG] > -INFINITY) sum += exp(logits[row + begin + i * WG] - top);
    sum = group_sum_max(sum, 0.0).x;
    if (LANE == 0) {
        parts[part] = floatBitsToInt(top);
        parts[part + 1] = floatBitsToInt(sum);
    }
    uvec2 last = uvec2(0xFFFFFFFFu, 0);
    for (int j = 0; j < k; j++) {
        uvec2 mine = NONE;
        for (int i = 0; i < EACH; i++) {
            uint v = begin + i * WG;
            if (v >= n) break;
            uvec2 c = uvec2(float_key(logits[row + v]), v);
            if ((j == 0 || before(last, c)) && before(c, mine)) mine = c;
        }
        last = group_best(mine);
        if (LANE == 0) {
            parts[part + 2 + j] = token_of(last);
            parts[part + 2 + MAX_LOGPROBS + j] = floatBitsToInt(logit_of(last));
        }
    }
}
#else
// A work-group a row; there are no more parts than invocations.
KERNEL(logprobs) {
    uint r = gl_WorkGroupID.x;
    int t = LANE, k = STEP_LOGPROBS - 1, taken = 0;
    if (int(r) >= STEP_ROWS) return;
    uint part = (r * count + min(t, count - 1)) * PITCH;
    float top = t < count ? intBitsToFloat(parts[part]) : -INFINITY;
    float greatest = group_sum_max(0.0, top).y;
    float share = t < count && top > -INFINITY ? intBitsToFloat(parts[part + 1]) * exp(top - greatest) : 0.0;
    float rest = log(group_sum_max(share, 0.0).x);
    uint to = (STEP_DONE * STEP_ROWS + r) * (1 + 2 * k);
    if (t == 0) history[to] = floatBitsToInt(logits[r * uint(n) + max(next[r], 0)] - greatest - rest);
    for (int j = 0; j < k; j++) {
        uvec2 mine = NONE;
        if (t < count && taken < k && parts[part + 2 + taken] >= 0)
            mine = uvec2(float_key(intBitsToFloat(parts[part + 2 + MAX_LOGPROBS + taken])), parts[part + 2 + taken]);
        uvec2 best = group_best(mine);
        if (mine != NONE && mine == best) taken++;
        if (t == 0) {
            history[to + 1 + j] = token_of(best);
            history[to + 1 + k + j] = floatBitsToInt(logit_of(best) - greatest - rest);
        }
    }
}
#endif
