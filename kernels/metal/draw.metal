// Shared by sample and the compact head, which must agree: the order of floats as integers, and the noise of a draw.

inline uint float_key(float z) {
    uint bits = z == 0.0f ? 0u : as_type<uint>(z);  // -0 is 0
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}
inline bool no_number(float z) { return (as_type<uint>(z) & 0x7FFFFFFFu) > 0x7F800000u; }
inline float key_float(uint key) { return as_type<float>((key & 0x80000000u) != 0u ? key & 0x7FFFFFFFu : ~key); }

// -ln(1 - t) with a small relative error also near t = 0, where a log may have only a small absolute one.
inline float minus_log1m(float t) {
    if (t > 0.5f) return -precise::log(1.0f - t);
    float s = t / (2.0f - t), square = s * s, sum = 0.0f;  // 2 artanh(s), s <= 1/3
    for (int i = 19; i >= 1; i -= 2) sum = sum * square + 1.0f / float(i);
    return 2.0f * s * sum;
}

// Lane v & 3 of Philox4x32-10 (Salmon et al. 2011) at counter (v >> 2, position, 0, 0), as a Gumbel variate.
inline float gumbel(uint seed_lo, uint seed_hi, uint v, uint position) {
    uint4 c = uint4(v >> 2, position, 0u, 0u);
    uint2 key = uint2(seed_lo, seed_hi);
    for (int turn = 0; turn < 10; turn++) {
        uint lo0 = c.x * 0xD2511F53u, hi0 = mulhi(c.x, 0xD2511F53u);
        uint lo1 = c.z * 0xCD9E8D57u, hi1 = mulhi(c.z, 0xCD9E8D57u);
        c = uint4(hi1 ^ c.y ^ key.x, lo1, hi0 ^ c.w ^ key.y, lo0);
        key += uint2(0x9E3779B9u, 0xBB67AE85u);
    }
    uint bits = ((v & 3u) == 0u ? c.x : (v & 3u) == 1u ? c.y : (v & 3u) == 2u ? c.z : c.w) >> 9;
    float t = (float(0x7FFFFFu - bits) + 0.5f) * 1.1920928955078125e-7f;  // 1 - u, exactly
    return -precise::log(minus_log1m(t));
}
