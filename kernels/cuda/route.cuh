// The choice of a token's experts, by a warp: the greatest logits one after the other, of equal ones the lowest expert first.
#define EACH ((EXPERTS + WARP - 1) / WARP) /* logits of a lane: those of experts lane, lane + 32, … */

// Numbers are ordered as their keys, which are above 0, and below that of what is no number, so that a share tells of it.
__device__ __forceinline__ unsigned key_of(float logit) {
    int bits = __float_as_int(__fadd_rn(logit, 0.0f));  // -0 equals 0
    return logit != logit ? 0xFFFFFFFFu : (unsigned)bits ^ ((unsigned)(bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float logit_of(unsigned key) { return __int_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

__device__ __forceinline__ unsigned warp_max(unsigned v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(FULL, v);
#else
    for (int i = WARP / 2; i > 0; i /= 2) v = max(v, __shfl_xor_sync(FULL, v, i));
    return v;
#endif
}

// The experts that are left.
struct Choice {
    unsigned keys[EACH];

    __device__ __forceinline__ void load(const float *logits) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int e = i * WARP + threadIdx.x % WARP;
            keys[i] = e < EXPERTS ? key_of(((const volatile float *)logits)[e]) : 0;
        }
    }

    // Takes the best, and tells its logit.
    __device__ __forceinline__ int take(float &logit) {
        unsigned mine = 0, best, first = 0;  // the complement of the best's number
#pragma unroll
        for (int i = 0; i < EACH; i++) mine = max(mine, keys[i]);
        best = warp_max(mine);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (keys[i] == best) first = max(first, ~(unsigned)(i * WARP + threadIdx.x % WARP));
        }
        int expert = ~warp_max(first);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (i * WARP + (int)(threadIdx.x % WARP) == expert) keys[i] = 0;
        }
        logit = logit_of(best);
        return expert;
    }
};
