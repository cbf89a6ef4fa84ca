// The paged cache: block after block, [BLOCK, kv_heads, DIM] each. In int8 a word has the codes of four dimensions, and a block's
// codes are followed by the scales of its rows. A row is one position of one key/value head.
#if KV_I8
// The words of a row's first codes, and of its scale.
uvec2 row_of(uint block, uint position, uint kv_head, uint kv_heads) {
    uint rows = BLOCK * kv_heads, row = position % BLOCK * kv_heads + kv_head, first = block * rows * uint(DIM / 4 + 1);
    return uvec2(first + row * uint(DIM / 4), first + rows * uint(DIM / 4) + row);
}

// Four codes as numbers, without their scale.
vec4 coded(uint word) {
    int w = int(word);
    return vec4(bitfieldExtract(w, 0, 8), bitfieldExtract(w, 8, 8), bitfieldExtract(w, 16, 8), bitfieldExtract(w, 24, 8));
}

uint magnitude_bits(vec4 v) {
    uvec4 bits = floatBitsToUint(v) & 0x7FFFFFFFu;
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// The factor that turns a row into codes, and its scale, from the greatest bits of its magnitudes. The scale is NaN where not all are finite.
vec2 row_unit(uint greatest) {
    if (greatest >= 0x7F800000u) return vec2(0.0, uintBitsToFloat(greatest | 0x7FC00000u));
    float largest = uintBitsToFloat(greatest);
    return largest < 1e-30 ? vec2(0.0) : vec2(quant_factor(largest), largest / 127.0);
}
#endif
