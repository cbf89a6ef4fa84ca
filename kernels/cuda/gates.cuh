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

    // Puts the threads' parts of head h together. It takes the whole block, of WG threads; `out` is of the token.
    __device__ __forceinline__ void finish(int h, float *out, const float *bias, const float *rate, int width, int heads, float eps) {
        __shared__ float parts[3][WG / WARP];
        sum = warp_reduce<Sum>(sum), decay = warp_reduce<Sum>(decay), strength = warp_reduce<Sum>(strength);
        if (threadIdx.x % WARP == 0) {
            int warp = threadIdx.x / WARP;
            parts[0][warp] = sum, parts[1][warp] = decay, parts[2][warp] = strength;
        }
        __syncthreads();
        if (threadIdx.x >= 2) return;
        float total = 0.0f, dot = 0.0f;
        for (int w = 0; w < WG / WARP; w++) total += parts[0][w], dot += parts[1 + threadIdx.x][w];
        put_gate(out, threadIdx.x * heads + h, dot * (1.0f / sqrtf(total / width + eps)), bias, rate, heads);
    }
};
