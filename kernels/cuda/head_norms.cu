// RMSNorm of each head of q and of k in place, before they are rotated. One block per token and head (q heads, k heads), of WG
// threads, at most a warp; WG is a power of two that divides DIM.
extern "C" __global__ void head_norms(const int *step, float *qkv, const float *q_norm, const float *k_norm, float eps, int heads,
                                      int kv_heads) {
    int m = blockIdx.x, head = blockIdx.y;
    if (m >= STEP_TOKENS(step)) return;
    float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    const float *norm = head < heads ? q_norm : k_norm;
    float v[DIM / WG], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < DIM / WG; i++) {
        v[i] = row[i * WG + threadIdx.x];
        sum += v[i] * v[i];
    }
    const unsigned present = WG == WARP ? FULL : (1u << WG % WARP) - 1;
    for (int i = WG / 2; i > 0; i /= 2) sum += __shfl_xor_sync(present, sum, i);
    float root = sqrtf(sum / DIM + eps);
#pragma unroll
    for (int i = 0; i < DIM / WG; i++) row[i * WG + threadIdx.x] = v[i] * norm[i * WG + threadIdx.x] / root;
}
