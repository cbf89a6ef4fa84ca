// A word of a ternary table holds, at each bit pair, four neighbours of K: pair 3 (the top) weights k..k+3, pair 2 those 32 further,
// and so on. These are the weights whose codes stand at the lowest bits of the word's bytes.
inline float4 table_weights(uint word, half scale) {
    return (float4(as_type<uchar4>(word & 0x03030303u)) - 1.0f) * float(scale);
}
