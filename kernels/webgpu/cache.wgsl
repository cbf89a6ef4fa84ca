// The paged cache: block after block, [BLOCK, kv_heads, DIM] each. In int8 a word has the codes of four dimensions, and a block's
// codes are followed by the scales of its rows. A row is one position of one key/value head.
#if KV_I8
// Places in the cache, in words: of a row's first codes, and of its scale.
struct Row { codes: u32, scale: u32 }
fn row_of(block: u32, row: u32, rows: u32) -> Row {
    let first = block * rows * u32(DIM / 4 + 1);
    return Row(first + row * u32(DIM / 4), first + rows * u32(DIM / 4) + row);
}

// Four codes and the bits of their scale, as numbers.
fn coded(quad: vec2<u32>) -> vec4<f32> {
    let codes = vec4(bitcast<i32>(quad.x) << 24u, bitcast<i32>(quad.x) << 16u, bitcast<i32>(quad.x) << 8u, bitcast<i32>(quad.x)) >> vec4(24u);
    return vec4<f32>(codes) * bitcast<f32>(quad.y);
}

fn magnitude_bits(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4(0x7FFFFFFFu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// The factor that turns a row into codes, and its scale, from the greatest bits of its magnitudes. The scale is NaN where not all are finite.
fn row_unit(greatest: u32) -> vec2<f32> {
    if (greatest >= 0x7F800000u) { return vec2(0.0, bitcast<f32>(greatest | 0x7FC00000u)); }
    let largest = bitcast<f32>(greatest);
    if (largest < 1e-30) { return vec2(0.0); }
    return vec2(quant_factor(largest), quant_scale(largest));
}
#endif
