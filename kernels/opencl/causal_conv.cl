// A causal convolution of each column, then SiLU. A work-group WG columns of a token. A work-item computes its token if all taps are
// rows of the step. The first token's also computes those after it that need the state, and then the new state: nothing else touches it.
kernel void causal_conv(global const int *step, int token_seq, int seq_begin, int state_from, int state_to, global const float *x,
                        global const float *weight, global float *state, global float *out, int channels) {
    int m = get_group_id(1), c = get_global_id(0);
    if (m >= STEP_TOKENS(step) || c >= channels) return;
    int seq = step[token_seq + m], begin = step[seq_begin + seq], tokens = step[seq_begin + seq + 1] - begin, first = m - begin;
    if (first > 0 && first < TAPS - 1) return;
    int source = STATE_SOURCE(step, state_from, state_to, seq), last = first ? first : min(tokens, TAPS - 1) - 1;
    size_t entry = (size_t)(TAPS - 1) * channels;
    global const float *rows = x + (size_t)begin * channels + c, *before = state + max(source, 0) * entry + c;
    for (int i = first; i <= last; i++) {
        float sum = 0.0f;
        for (int j = 0; j < TAPS; j++) {
            int row = i - TAPS + 1 + j;
            float value = row >= 0 ? rows[(size_t)row * channels] : source < 0 ? 0.0f : before[(size_t)(TAPS - 1 + row) * channels];
            sum += weight[(size_t)c * TAPS + j] * value;
        }
        out[(size_t)(begin + i) * channels + c] = silu(sum);
    }
    if (first) return;
    global float *after = state + step[state_to + seq] * entry + c;
    for (int r = 0; r < TAPS - 1; r++) {  // a row moves to one before it, so the state may be its own source
        int row = tokens - TAPS + 1 + r;
        after[(size_t)r * channels] =
            row >= 0 ? rows[(size_t)row * channels] : source < 0 ? 0.0f : before[(size_t)(TAPS - 1 + row) * channels];
    }
}
