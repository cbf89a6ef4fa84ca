// Products of f32 rows with f16 weights on the tensor cores. A row goes in scaled by the power of two that brings its greatest
// magnitude to 2^14 ... 2^15, as the sum of two halves; what is lost is under 2^-22 of an element, or 2^-39 of the greatest.

__device__ __forceinline__ float split_scale(float largest) {
    int exponent = min(max((int)(__float_as_uint(largest) >> 23), 15), 253);  // infinities and zeros too
    return __uint_as_float((unsigned)(254 - exponent) << 23) * 16384.0f;
}

// The two halves of a scaled element, `apart` from one another.
__device__ __forceinline__ void split_store(f16 *high, int apart, float scaled) {
    put(high, scaled);
    put(high + apart, scaled - to_float(*high));
}

__device__ __forceinline__ void f16_mma(float (&c)[4], uint2 a, uint2 b, uint2 x) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(b.x), "r"(a.y), "r"(b.y), "r"(x.x), "r"(x.y));
}

// Sums of 16 rows of weights with 8 rows of x, 32 columns at a time: a thread has 16 bytes of the weight rows a and b (8 below),
// and of the high or low half of x. CHAINS separate sums shorten the chains of dependent products.
template <int CHAINS>
struct DenseSums {
    float parts[CHAINS][4];
    __device__ __forceinline__ void add(uint4 a, uint4 b, uint4 x, int low) {
        f16_mma(parts[2 * low % CHAINS], make_uint2(a.x, a.y), make_uint2(b.x, b.y), make_uint2(x.x, x.y));
        f16_mma(parts[(2 * low + 1) % CHAINS], make_uint2(a.z, a.w), make_uint2(b.z, b.w), make_uint2(x.z, x.w));
    }
    __device__ __forceinline__ float of(int i) const {
        return CHAINS == 1 ? parts[0][i] : (parts[0][i] + parts[1 % CHAINS][i]) + (parts[2 % CHAINS][i] + parts[3 % CHAINS][i]);
    }
};
