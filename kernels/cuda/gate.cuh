// Shared by the kernels of gated_quant.
__device__ __forceinline__ float activated(float gate) {
    float sigmoid;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(sigmoid) : "f"(1.0f + expf(-gate)));  // within 1 ulp, and 0 from 2^126 on
    return SILU ? gate * sigmoid : sigmoid;
}

// The place of a head: where UNTILE, all heads of a key head are together behind the kernel, and in turns before it.
__device__ __forceinline__ int place_of(int head, int heads) {
    return UNTILE ? head % max(UNTILE, 1) * (heads / max(UNTILE, 1)) + head / max(UNTILE, 1) : head;
}

// The head that has this place.
__device__ __forceinline__ int head_at(int place, int heads) {
    int turns = heads / max(UNTILE, 1);
    return UNTILE ? place % turns * UNTILE + place / turns : place;
}
