// What both kernels of a ternary table with a scale for each GROUP of columns share. A word of codes holds, at each bit pair, four
// neighbours: the top pair columns k to k + 3, the next those 32 further, and so on. Rows of the table are bound from `first` on.
const ROW = u32(ROW_BYTES / 4);     // words of a row
const COUNT = u32(COLS / GROUP);    // groups of a row
const QUADS = u32(COLS / 4);

// Four weights, from column k on, of a row and its word of codes.
fn weights_at(row: u32, word: u32, k: u32) -> vec4<f32> {
    let pairs = (word >> (6u - k % 128u / 32u * 2u)) & 0x03030303u;
    let codes = (vec4(pairs) >> vec4(0u, 8u, 16u, 24u)) & vec4(3u);
    let at = (args.first + row) * COUNT + k / u32(GROUP);
    return (vec4<f32>(codes) - 1.0) * unpack2x16float(w_scale[at / 2u])[at % 2u];
}
