// A causal convolution of each column, then SiLU. A threadgroup WG columns of a token. A thread computes its token if all taps are rows of
// the step. The first token's also computes those after it that need the state, and then the new state: nothing else touches it.
[[kernel, max_total_threads_per_threadgroup(WG)]] void causal_conv(
    device const int *step [[buffer(0)]], constant int &token_seq [[buffer(1)]], constant int &seq_begin [[buffer(2)]],
    constant int &state_from [[buffer(3)]], constant int &state_to [[buffer(4)]], device const float *x [[buffer(5)]],
    device const float *weight [[buffer(6)]], device float *state [[buffer(7)]], device float *out [[buffer(8)]],
    constant int &channels [[buffer(9)]], PLACE) {
    int m = int(group.y), c = int(group.x) * WG + int(index);
    if (m >= STEP_TOKENS(step) || c >= channels) return;
    int seq = step[token_seq + m], begin = step[seq_begin + seq], tokens = step[seq_begin + seq + 1] - begin, first = m - begin;
    if (first > 0 && first < TAPS - 1) return;
    int source = STATE_SOURCE(step, state_from, state_to, seq), last = first ? first : min(tokens, TAPS - 1) - 1;
    ulong pitch = ulong(channels), entry = (TAPS - 1) * pitch;
    device const float *rows = x + ulong(begin) * pitch + ulong(c);
    device const float *before = state + ulong(max(source, 0)) * entry + ulong(c);
    for (int i = first; i <= last; i++) {
        float sum = 0.0f;
        for (int j = 0; j < TAPS; j++) {
            int row = i - TAPS + 1 + j;
            float value = row >= 0 ? rows[ulong(row) * pitch] : source < 0 ? 0.0f : before[ulong(TAPS - 1 + row) * pitch];
            sum += weight[ulong(c) * TAPS + ulong(j)] * value;
        }
        out[ulong(begin + i) * pitch + ulong(c)] = silu(sum);
    }
    if (first) return;
    device float *after = state + ulong(step[state_to + seq]) * entry + ulong(c);
    for (int r = 0; r < TAPS - 1; r++) {  // a row moves to one before it, so the state may be its own source
        int row = tokens - TAPS + 1 + r;
        after[ulong(r) * pitch] = row >= 0 ? rows[ulong(row) * pitch] : source < 0 ? 0.0f : before[ulong(TAPS - 1 + row) * pitch];
    }
}
