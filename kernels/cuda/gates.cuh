// What the kernels of delta_gates share.
__device__ __forceinline__ void put_gate(float *out, int row, float dot, const float *bias, const float *rate, int heads) {
    if (row < heads) {
        float z = dot + bias[row];
        out[row] = rate[row] * (fmaxf(z, 0.0f) + log1pf(expf(-fabsf(z))));
    } else {
        out[row] = 1.0f / (1.0f + expf(-dot));
    }
}

// What a thread has of a head: the sum of squares of the row, and its products with the head's alpha and beta.
struct Gates {
    float sum = 0.0f, decay = 0.0f, strength = 0.0f;

    __device__ __forceinline__ void add(float4 v, float4 gain, float4 a, float4 b) {
        float4 y = times(v, gain), p = times(y, a), q = times(y, b);
        sum += squares(v);
        decay += (p.x + p.y) + (p.z + p.w);
        strength += (q.x + q.y) + (q.z + q.w);
    }
};

// Puts the threads' parts of head h together, of COUNT tokens of which `tokens` are there; `out` is of the first. It takes the whole
// block, of WG threads.
template <int COUNT>
__device__ __forceinline__ void finish_gates(Gates (&of)[COUNT], int tokens, int h, float *out, const float *bias, const float *rate, int width,
                                             int heads, float eps) {
    __shared__ float parts[COUNT][3][WG / WARP];
    int warp = threadIdx.x / WARP;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        float sum = warp_reduce<Sum>(of[t].sum), decay = warp_reduce<Sum>(of[t].decay), strength = warp_reduce<Sum>(of[t].strength);
        if (threadIdx.x % WARP == 0) parts[t][0][warp] = sum, parts[t][1][warp] = decay, parts[t][2][warp] = strength;
    }
    __syncthreads();
    int t = threadIdx.x / 2, which = threadIdx.x % 2;
    if (t >= COUNT || t >= tokens) return;
    float total = 0.0f, dot = 0.0f;
    for (int w = 0; w < WG / WARP; w++) total += parts[t][0][w], dot += parts[t][1 + which][w];
    put_gate(out + (size_t)t * 2 * heads, which * heads + h, dot * (1.0f / sqrtf(total / width + eps)), bias, rate, heads);
}
