// What both kernels of a ternary table with a scale for each GROUP of columns share. A word of codes holds, at each bit pair, four
// neighbours: pair 3 (the top) columns k to k + 3, pair 2 those 32 further, and so on. Rows of the table are bound from `first` on.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int ROW_BYTES = 32;
layout(constant_id = 3) const int GROUP = 128;
const uint ROW = ROW_BYTES / 4;    // words of a row
const uint COUNT = COLS / GROUP;   // groups of a row
const uint QUADS = COLS / 4;

// Four weights, from column k on, of a row and its word of codes.
vec4 weights_at(uint row, uint word, uint k) {
    uint at = (first + row) * COUNT + k / GROUP, pairs = codes_of(word, 3 - int(k % 128 / 32));
    vec2 pair = unpackHalf2x16(w_scale[at / 2]);
    return (vec4(uvec4(pairs, pairs >> 8, pairs >> 16, pairs >> 24) & 3) - 1.0) * (at % 2 == 0 ? pair.x : pair.y);
}
