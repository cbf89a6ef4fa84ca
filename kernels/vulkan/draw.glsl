// Shared by sample and the compact head, which must agree: the order of floats as integers, and the noise of a draw.

uint float_key(float z) {
    uint bits = z == 0.0 ? 0u : floatBitsToUint(z);  // -0 is 0
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}
bool no_number(float z) { return (floatBitsToUint(z) & 0x7FFFFFFFu) > 0x7F800000u; }
float key_float(uint key) { return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7FFFFFFFu : ~key); }

// -ln(1 - t) with a small relative error also near t = 0, where Vulkan's log has only a small absolute one.
float minus_log1m(float t) {
    if (t > 0.5) return -log(1.0 - t);
    float s = t / (2.0 - t), square = s * s, sum = 0.0;  // 2 artanh(s), s <= 1/3
    for (int i = 19; i >= 1; i -= 2) sum = sum * square + 1.0 / float(i);
    return 2.0 * s * sum;
}

// Philox4x32-10 (Salmon et al. 2011) at counter (v / 4, position, use, 0): its lanes are for the tokens v ... v + 3, v a multiple of
// 4. Use 0 is the noise of a draw.
uvec4 noise_words(uint seed_lo, uint seed_hi, uint v, uint position, uint use) {
    uvec4 c = uvec4(v >> 2, position, use, 0);
    uvec2 key = uvec2(seed_lo, seed_hi);
    for (int turn = 0; turn < 10; turn++) {
        uint hi0, lo0, hi1, lo1;
        umulExtended(c.x, 0xD2511F53u, hi0, lo0);
        umulExtended(c.z, 0xCD9E8D57u, hi1, lo1);
        c = uvec4(hi1 ^ c.y ^ key.x, lo1, hi0 ^ c.w ^ key.y, lo0);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
// A word of it as a Gumbel variate.
float gumbel_of(uint word) {
    float t = (float(0x7FFFFFu - (word >> 9)) + 0.5) * 1.1920928955078125e-7;  // 1 - u, exactly
    return -log(minus_log1m(t));
}
float gumbel(uint seed_lo, uint seed_hi, uint v, uint position) {
    return gumbel_of(noise_words(seed_lo, seed_hi, v, position, 0)[v & 3u]);
}
