// Sums of groups as products on wgmma leave them: integers that count 64-fold, as a code at the top of its byte is 64 times the weight.
__device__ __forceinline__ unsigned load_shared(unsigned at) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

// total += the sums of a group, scaled. FUSED: products are exact, so that one rounding gives the contract's bits.
template <bool FUSED>
__device__ __forceinline__ void add_scaled(float (&total)[NT][4], const int (&acc)[NT][4], float low, float high) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float sum = (float)acc[n][j], unit = j < 2 ? low : high;
            total[n][j] = FUSED ? __fmaf_rn(sum, unit, total[n][j]) : __fadd_rn(total[n][j], __fmul_rn(sum, unit));
        }
    }
}

// `exact`: no sum is greater than 2^13 (the sources say when).
__device__ __forceinline__ void add_group(float (&total)[NT][4], const int (&acc)[NT][4], float low, float high, bool exact) {
    if (exact) add_scaled<true>(total, acc, low, high);
    else add_scaled<false>(total, acc, low, high);
}

// The first or second of two scales.
template <int SECOND>
__device__ __forceinline__ float factor(unsigned halves) { return to_float(f16{(unsigned short)(halves >> 16 * SECOND)}); }
