// Shared by sample and head_choose, which must agree: the order of floats as integers, the noise of a draw, and the winner.

__device__ __forceinline__ unsigned float_key(float z) {
    unsigned bits = z == 0.0f ? 0 : __float_as_uint(z);  // -0 is 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ bool no_number(float z) { return (__float_as_uint(z) & 0x7FFFFFFFu) > 0x7F800000u; }
__device__ __forceinline__ float key_float(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// Philox4x32-10 (Salmon et al. 2011) at counter (v / 4, position, use, 0): its lanes are for the tokens v ... v + 3, v a multiple of
// 4. Use 0 is the noise of a draw.
__device__ __forceinline__ uint4 noise_words(unsigned seed_lo, unsigned seed_hi, unsigned v, unsigned position, unsigned use = 0) {
    uint4 c = make_uint4(v >> 2, position, use, 0);
    for (int round = 0; round < 10; round++) {
        unsigned lo0 = c.x * 0xD2511F53u, hi0 = __umulhi(c.x, 0xD2511F53u);
        unsigned lo1 = c.z * 0xCD9E8D57u, hi1 = __umulhi(c.z, 0xCD9E8D57u);
        c = make_uint4(hi1 ^ c.y ^ seed_lo, lo1, hi0 ^ c.w ^ seed_hi, lo0);
        seed_lo += 0x9E3779B9u;
        seed_hi += 0xBB67AE85u;
    }
    return c;
}
__device__ __forceinline__ unsigned lane_of(uint4 words, unsigned v) {
    return (v & 3) == 0 ? words.x : (v & 3) == 1 ? words.y : (v & 3) == 2 ? words.z : words.w;
}
// A word of it as a Gumbel variate.
__device__ __forceinline__ float gumbel_of(unsigned word) {
    float u = ((float)(word >> 9) + 0.5f) * 0x1p-23f;
    return -logf(-logf(u));
}
__device__ __noinline__ float gumbel(unsigned seed_lo, unsigned seed_hi, unsigned v, unsigned position) {
    uint4 c = noise_words(seed_lo, seed_hi, v, position);
    return gumbel_of(lane_of(c, v));
}

// A key and its token as one number, whose maximum is the winner: the lowest token among equals. A NaN key wins over all and
// chooses -1.
typedef unsigned long long Candidate;
#define NO_NUMBER (~0ull)
__device__ __forceinline__ Candidate candidate(float key, int n) {
    return no_number(key) ? NO_NUMBER : (Candidate)float_key(key) << 32 | (FULL - n);
}
__device__ __forceinline__ Candidate warp_best(Candidate mine) {
#if __CUDA_ARCH__ >= 800
    unsigned key = __reduce_max_sync(FULL, (unsigned)(mine >> 32));
    unsigned token = __reduce_max_sync(FULL, (unsigned)(mine >> 32) == key ? (unsigned)mine : 0);
    return (Candidate)key << 32 | token;
#else
    for (int i = WARP / 2; i > 0; i /= 2) mine = max(mine, __shfl_xor_sync(FULL, mine, i));
    return mine;
#endif
}
__device__ __forceinline__ int winner(Candidate best) {
    return best == NO_NUMBER ? -1 : best ? (int)(FULL - (unsigned)best) : 0;
}
// The token of one of the likeliest, and its logit; -1 where there are fewer tokens.
__device__ __forceinline__ int token_of(Candidate c) { return c ? (int)(FULL - (unsigned)c) : -1; }
__device__ __forceinline__ float logit_of(Candidate c) { return c ? key_float((unsigned)(c >> 32)) : -INFINITY_F; }
