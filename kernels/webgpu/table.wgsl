// What both kernels of a ternary table with a scale for each GROUP of columns share. A word of codes holds, at each bit pair, four
// neighbours: the top pair columns k to k + 3, the next those 32 further, and so on. Rows of the table are bound from `first` on.
const ROW = u32(ROW_BYTES / 4);     // words of a row
const COUNT = u32(COLS / GROUP);    // groups of a row
const QUADS = u32(COLS / 4);

// Four codes, from column k on, of a word of codes, as floats less 1. They become halves from 1,024 on, which are floats without the
// conversion of an integer.
fn signs_at(word: u32, k: u32) -> vec4<f32> {
    let pairs = word >> (6u - k % 128u / 32u * 2u);
    let even = unpack2x16float((pairs & 0x00030003u) | 0x64006400u);
    let odd = unpack2x16float(((pairs >> 8u) & 0x00030003u) | 0x64006400u);
    return vec4(even.x, odd.x, even.y, odd.y) - 1025.0;
}

// The scale of column k of a row.
fn unit_at(row: u32, k: u32) -> f32 {
    let at = (args.first + row) * COUNT + k / u32(GROUP);
    return unpack2x16float(w_scale[at / 2u])[at % 2u];
}
