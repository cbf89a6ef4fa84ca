// causal_conv, with SiLU. A thread a column of a token whose taps are all rows of the step; that of a sequence's first token has
// the TAPS - 2 tokens behind it, too, and the state: it alone reads and writes that.
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(WG)
causal_conv(const int *step, int token_seq, int seq_begin, int state_from, int state_to, const float *x, const float *weight,
            float *state, float *out, int channels) {
    int c = blockIdx.x * WG + threadIdx.x, m = blockIdx.y;
    start_dependents();
    if (m >= STEP_TOKENS(step) || c >= channels) return;
    int s = step[token_seq + m], begin = step[seq_begin + s], end = step[seq_begin + s + 1], first = m - begin;
    if (first > 0 && first < TAPS - 1) return;
    float w[TAPS], rows[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) w[j] = weight[(size_t)c * TAPS + j];
    auto convolve = [&](int token) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) sum += w[j] * rows[j];
        out[(size_t)token * channels + c] = silu(sum);
    };
    if (first) {
        wait_for_before();
#pragma unroll
        for (int j = 0; j < TAPS; j++) rows[j] = x[(size_t)(m - TAPS + 1 + j) * channels + c];
        convolve(m);
        return;
    }
    int to = step[state_to + s], from = STEP_DONE(step) ? to : step[state_from + s];
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) rows[j] = from < 0 ? 0.0f : state[((size_t)from * (TAPS - 1) + j) * channels + c];
    wait_for_before();
    auto shift = [&](int token) {
#pragma unroll
        for (int j = 0; j < TAPS - 2; j++) rows[j] = rows[j + 1];
        rows[TAPS - 2] = x[(size_t)token * channels + c];
    };
    for (int token = begin; token < min(end, begin + TAPS - 1); token++) {
        rows[TAPS - 1] = x[(size_t)token * channels + c];
        convolve(token);
        shift(token);
    }
    for (int token = max(begin + TAPS - 1, end - TAPS + 1); token < end; token++) shift(token);
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) state[((size_t)to * (TAPS - 1) + j) * channels + c] = rows[j];
}
