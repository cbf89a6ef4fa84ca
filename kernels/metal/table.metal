// Each bit pair of a word of a ternary table holds four neighbouring columns: pair 3 (the top) the weights k..k+3, pair 2 those 32
// columns further, and so on. This gives the weights whose codes are at the lowest bits of the word's bytes.
inline float4 table_weights(uint word, half scale) {
    return (float4(as_type<uchar4>(word & 0x03030303u)) - 1.0f) * float(scale);
}
