// Offsets of columns k to k + 3 of the compact head: 7.5 and a dither in [-1/2, 1/2), scrambled multiples of the golden ratio.
vec4 head_offsets(uint k) {
    uvec4 a = (k + uvec4(1, 2, 3, 4)) * 0x9E3779B9u;
    a = (a ^ a >> 16) * 0x85EBCA6Bu;
    a = (a ^ a >> 13) * 0xC2B2AE35u;
    return 7.5 + (vec4((a ^ a >> 16) >> 8) * 5.9604644775390625e-8 - 0.5);
}
