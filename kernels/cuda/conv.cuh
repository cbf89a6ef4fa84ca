// What the kernels of causal_conv share.
__device__ __forceinline__ float silu(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + expf(-x)));  // within 1 ulp, and 0 from 2^126 on
    return x * r;
}

// A column of causal_conv for a sequence that has one token in the step. What does not depend on the token is fetched first, so that
// nobody waits for memory when the token's x is known. Nobody else may read or write this column of the sequence's entries.
struct ConvColumn {
    float rows[TAPS - 1], weights[TAPS], *held;

    __device__ __forceinline__ void fetch(int c, int from, int to, const float *weight, float *state, int channels) {
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) rows[j] = from < 0 ? 0.0f : state[((size_t)from * (TAPS - 1) + j) * channels + c];
#pragma unroll
        for (int j = 0; j < TAPS; j++) weights[j] = weight[(size_t)c * TAPS + j];
        held = state + (size_t)to * (TAPS - 1) * channels + c;
    }

    // The column's result; moves its state on.
    __device__ __forceinline__ float convolve(float x, int channels) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) sum += weights[j] * rows[j];
#pragma unroll
        for (int j = 0; j < TAPS - 1; j++) held[(size_t)j * channels] = j + 2 < TAPS ? rows[j + 1] : x;
        return silu(sum + weights[TAPS - 1] * x);
    }
};
