// Log-probabilities of each row, of logits as they are: of the chosen token, and of the likeliest ones, as many as the step asks for.
// logprobs_parts finds the likeliest of each share of a row, of EACH * WG logits; logprobs puts what it found together. A part is PITCH
// words: the greatest logit, the sum of e^(z - greatest), then tokens in order, then their logits.
#define MAX_LOGPROBS 20
#define PITCH (2 + 2 * MAX_LOGPROBS)
#define NONE ((uint2)(0, 0xFFFFFFFFu))

// A logit's key and its token; the likeliest has the greatest key, and of equals the lowest token.
inline int before(uint2 a, uint2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }
inline int is_none(uint2 c) { return c.x == 0 && c.y == 0xFFFFFFFFu; }
inline float logit_of(uint2 c) {
    return is_none(c) ? -INFINITY : as_float(c.x & 0x80000000u ? c.x & 0x7FFFFFFFu : ~c.x);
}

// The likeliest of the work-group, in every work-item. The token of none is -1.
inline uint2 group_best(uint2 mine, local uint2 *bests) {
    int lane = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    bests[lane] = mine;
    for (int half_size = WG / 2; half_size > 0; half_size /= 2) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lane < half_size && before(bests[lane + half_size], bests[lane])) bests[lane] = bests[lane + half_size];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    return bests[0];
}

kernel void logprobs_parts(global const int *step, global const float *logits, global uint *parts, int n, int count) {
    local float2 scratch[WG];
    local uint2 bests[WG];
    int r = get_group_id(1), lane = get_local_id(0), begin = get_group_id(0) * EACH * WG + lane, k = STEP_LOGPROBS(step) - 1;
    if (r >= STEP_ROWS(step)) return;
    global const float *row = logits + (size_t)r * n;
    global uint *part = parts + ((size_t)r * count + get_group_id(0)) * PITCH;
    float top = -INFINITY, sum = 0.0f;
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n) top = fmax(top, row[begin + i * WG]);
    top = group_max(top, scratch);
    for (int i = 0; i < EACH; i++)
        if (begin + i * WG < n && row[begin + i * WG] > -INFINITY) sum += exp(row[begin + i * WG] - top);
    sum = group_sum(sum, scratch);
    if (lane == 0) {
        part[0] = as_uint(top);
        part[1] = as_uint(sum);
    }
    uint2 last = NONE;
    for (int j = 0; j < k; j++) {
        uint2 mine = NONE;
        for (int i = 0; i < EACH; i++) {
            int v = begin + i * WG;
            if (v >= n) break;
            uint2 c = (uint2)(float_key(row[v]), (uint)v);
            if ((j == 0 || before(last, c)) && before(c, mine)) mine = c;
        }
        last = group_best(mine, bests);
        if (lane == 0) {
            part[2 + j] = last.y;
            part[2 + MAX_LOGPROBS + j] = as_uint(logit_of(last));
        }
    }
}

// A work-group a row; there are no more parts than work-items.
kernel void logprobs(global const int *step, global const float *logits, global const uint *parts, global const int *next,
                     global uint *history, int n, int count) {
    local float2 scratch[WG];
    local uint2 bests[WG];
    int r = get_group_id(0), t = get_local_id(0), k = STEP_LOGPROBS(step) - 1, taken = 0;
    if (r >= STEP_ROWS(step)) return;
    global const uint *part = parts + ((size_t)r * count + min(t, count - 1)) * PITCH;
    float top = t < count ? as_float(part[0]) : -INFINITY;
    float greatest = group_max(top, scratch);
    float sum = group_sum(t < count && top > -INFINITY ? as_float(part[1]) * exp(top - greatest) : 0.0f, scratch);
    float rest = log(sum);
    global uint *out = history + ((size_t)STEP_DONE(step) * STEP_ROWS(step) + r) * (1 + 2 * k);
    if (t == 0) out[0] = as_uint(logits[(size_t)r * n + max(next[r], 0)] - greatest - rest);
    for (int j = 0; j < k; j++) {
        uint2 mine = NONE;
        if (t < count && taken < k && part[2 + taken] != NONE.y)
            mine = (uint2)(float_key(as_float(part[2 + MAX_LOGPROBS + taken])), part[2 + taken]);
        uint2 best = group_best(mine, bests);
        if (!is_none(mine) && mine.y == best.y) taken++;
        if (t == 0) {
            out[1 + j] = best.y;
            out[1 + k + j] = as_uint(logit_of(best) - greatest - rest);
        }
    }
}
