// What the kernels of causal_conv share.
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

// A column of causal_conv for a sequence that has one token in the step, whose x is given: reads the column of the state, and moves it on.
// Nobody else may read or write this column of the sequence's entries.
__device__ __forceinline__ float convolve_one(float x, int c, int seq, const int *step, int state_from, int state_to, const float *weight,
                                              float *state, int channels) {
    int to = step[state_to + seq], from = STEP_DONE(step) ? to : step[state_from + seq];
    float rows[TAPS], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) rows[j] = from < 0 ? 0.0f : state[((size_t)from * (TAPS - 1) + j) * channels + c];
    rows[TAPS - 1] = x;
#pragma unroll
    for (int j = 0; j < TAPS; j++) sum += weight[(size_t)c * TAPS + j] * rows[j];
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) state[((size_t)to * (TAPS - 1) + j) * channels + c] = rows[j + 1];
    return silu(sum);
}
