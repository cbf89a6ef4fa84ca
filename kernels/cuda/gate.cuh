// Shared by the kernels of gated_quant.
__device__ __forceinline__ float activated(float gate) {
    float sigmoid = 1.0f / (1.0f + expf(-gate));
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
