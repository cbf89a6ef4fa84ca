// causal_conv, with SiLU. A thread has a column of TOKENS tokens, and keeps the rows that the next one needs, too. The thread of a
// sequence's first token has the TAPS - 2 tokens behind it, wherever they are, and the state: it alone reads and writes that.
#include "conv.cuh"

extern "C" __global__ void __launch_bounds__(WG)
causal_conv(const int *step, int token_seq, int seq_begin, int state_from, int state_to, const float *x, const float *weight,
            float *state, float *out, int channels) {
    int c = blockIdx.x * WG + threadIdx.x, m0 = blockIdx.y * TOKENS, tokens = STEP_TOKENS(step);
    start_dependents();
    if (m0 >= tokens || c >= channels) return;
    float w[TAPS], rows[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) w[j] = weight[(size_t)c * TAPS + j];
#if TOKENS > 1  // if no other sequence's rows and no state are needed, all rows are loaded before the first is waited for
    int last = m0 + TOKENS - 1, seq = step[token_seq + m0];
    if (last < tokens && step[token_seq + last] == seq && m0 - step[seq_begin + seq] >= TAPS - 1) {
        wait_for_before();
        float all[TOKENS + TAPS - 1];
#pragma unroll
        for (int j = 0; j < TOKENS + TAPS - 1; j++) all[j] = x[(size_t)(m0 - TAPS + 1 + j) * channels + c];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < TAPS; j++) sum += w[j] * all[t + j];
            out[(size_t)(m0 + t) * channels + c] = silu(sum);
        }
        // The state of a sequence of which these are the last tokens is left to the thread of its first one.
        return;
    }
#endif
    auto convolve = [&](int token) {
        rows[TAPS - 1] = x[(size_t)token * channels + c];
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) sum += w[j] * rows[j];
        out[(size_t)token * channels + c] = silu(sum);
    };
    auto shift = [&] {
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) rows[j] = rows[j + 1];
    };
    bool there = false;  // whether `rows` has those before the token
    for (int m = m0; m < min(m0 + TOKENS, tokens); m++) {
        int s = step[token_seq + m], begin = step[seq_begin + s], end = step[seq_begin + s + 1], first = m - begin;
        if (first >= TAPS - 1) {
            wait_for_before();
#pragma unroll
            for (int j = 0; j < TAPS - 1; j++)
                if (!there) rows[j] = x[(size_t)(m - TAPS + 1 + j) * channels + c];
            convolve(m), shift();
            there = true;
            continue;
        }
        there = false;
        if (first) continue;
        int to = step[state_to + s], from = STEP_DONE(step) ? to : step[state_from + s];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) rows[j] = from < 0 ? 0.0f : state[((size_t)from * (TAPS - 1) + j) * channels + c];
        wait_for_before();
        for (int token = m; token < min(end, m + TAPS - 1); token++) convolve(token), shift();
        for (int token = max(m + TAPS - 1, end - TAPS + 1); token < end; token++) rows[TAPS - 1] = x[(size_t)token * channels + c], shift();
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) state[((size_t)to * (TAPS - 1) + j) * channels + c] = rows[j];
    }
}
