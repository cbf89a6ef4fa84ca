// A causal convolution of each column, then SiLU. A work-group WG columns of a token. An invocation computes its token if all taps are
// rows of the step. The first token's also computes those after it that need the state, and then the new state: nothing else touches it.
layout(constant_id = 1) const int TAPS = 4;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, x);
BUFFER(2, readonly, float, weight);
BUFFER(3, , float, state);
BUFFER(4, writeonly, float, result);
layout(push_constant) uniform Push { int token_seq, seq_begin, state_from, state_to, channels; };
#include "states.glsl"

// Row `row` of a sequence whose first row of the step is `begin`: in the step, else in entry `source`, if there is one.
float row_of(int row, int begin, int source, int c) {
    if (row >= 0) return x[uint(begin + row) * channels + c];
    return source < 0 ? 0.0 : state[uint(source * (TAPS - 1) + TAPS - 1 + row) * channels + c];
}

KERNEL(causal_conv) {
    int m = int(gl_WorkGroupID.y), c = int(gl_GlobalInvocationID.x);
    if (m >= STEP_TOKENS || c >= channels) return;
    int seq = step_data[token_seq + m], begin = step_data[seq_begin + seq], first = m - begin;
    if (first > 0 && first < TAPS - 1) return;
    int tokens = step_data[seq_begin + seq + 1] - begin, source = state_source(seq);
    int last = first > 0 ? first : min(tokens, TAPS - 1) - 1;
    for (int i = first; i <= last; i++) {
        float sum = 0.0;
        [[unroll]] for (int j = 0; j < TAPS; j++)
            sum += weight[uint(c) * TAPS + j] * row_of(i - TAPS + 1 + j, begin, source, c);
        result[uint(begin + i) * channels + c] = sum / (1.0 + exp(-sum));
    }
    if (first > 0) return;
    uint to = uint(step_data[state_to + seq]) * (TAPS - 1);
    for (int r = 0; r < TAPS - 1; r++)  // a row moves to one before it, so the state may be its own source
        state[(to + r) * channels + c] = row_of(tokens - TAPS + 1 + r, begin, source, c);
}
