// Codes of ternary tables: a byte's lowest two bits are a weight plus one.
__device__ __forceinline__ float4 weights_of(unsigned word) {
    return make_float4((float)(int)(word & 3) - 1.0f, (float)(int)(word >> 8 & 3) - 1.0f, (float)(int)(word >> 16 & 3) - 1.0f,
                       (float)(int)(word >> 24 & 3) - 1.0f);
}
