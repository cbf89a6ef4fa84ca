// Codes become two's complement of -1, 0 and 1, all sixteen of a word at once. A bit pair at the top of its byte then counts 64-fold,
// which a factor undoes exactly.
const float UNFOLD = 1.0 / 64.0;
const uint TOP_PAIRS = 0xC0C0C0C0u;
uvec4 signed_codes(uvec4 w) { return (~w & 0x55555555u) | (~(w | w << 1) & 0xAAAAAAAAu); }

// Bit pair `plane` (0 the top) of each byte, at its top.
uvec4 top_pairs(uvec4 w, uint plane) { return w << 2 * plane & TOP_PAIRS; }

// One of two scales in a word: the one with the number `at` of all.
float scale_in(uint word, uint at) {
    vec2 pair = unpackHalf2x16(word);
    return at % 2 == 0 ? pair.x : pair.y;
}
