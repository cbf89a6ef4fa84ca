// An int8 cache: codes of four dimensions a word, and behind those of a block the scales of its rows. A row is a position and a
// key/value head. Declared before it: DIM, BLOCK, KV_I8, kv_heads.
#define BLOCK_ROWS uint(BLOCK * kv_heads)
#define BLOCK_CODES (BLOCK_ROWS * (DIM / 4))
#define BLOCK_WORDS (BLOCK_CODES + BLOCK_ROWS)

vec4 codes_of(uint word, float scale) {
    int codes = int(word);
    ivec4 each = ivec4(codes << 24, codes << 16, codes << 8, codes) >> 24;
    return vec4(each) * scale;
}

// How values become codes, of the greatest bits of their magnitudes: a factor, and the row's scale.
vec2 row_unit(uint greatest) {
    if (greatest >= 0x7F800000u) return vec2(0.0, uintBitsToFloat(0x7FC00000u));  // not all are finite
    float largest = uintBitsToFloat(greatest);
    return largest < 1e-30 ? vec2(0.0) : vec2(quant_factor(largest), largest / 127.0);
}
uint magnitude_bits(float value) { return floatBitsToUint(value) & 0x7FFFFFFFu; }
uint magnitude_bits(vec4 v) {
    return max(max(magnitude_bits(v.x), magnitude_bits(v.y)), max(magnitude_bits(v.z), magnitude_bits(v.w)));
}
