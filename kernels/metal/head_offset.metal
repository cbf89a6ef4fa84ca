// Offsets of columns k to k + 3 of the compact head: 7.5 and a dither in [-1/2, 1/2), scrambled multiples of the golden ratio.
inline float4 head_offsets(uint k) {
    uint4 a = (uint4(k, k, k, k) + uint4(1u, 2u, 3u, 4u)) * 0x9E3779B9u;
    a = (a ^ a >> 16u) * 0x85EBCA6Bu;
    a = (a ^ a >> 13u) * 0xC2B2AE35u;
    return 7.5f + (float4((a ^ a >> 16u) >> 8u) * 5.9604644775390625e-8f - 0.5f);
}
