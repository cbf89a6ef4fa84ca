// Activations of a block of 128 columns. Declared besides: COLS, and x, which has vec4<u32> where WIDE, else u32.

// 16 activations of a token, from 16 at on; zeros beyond COLS.
fn load_x(m: u32, at: u32) -> vec4<u32> {
#if WIDE
    if (at >= u32(COLS / 16)) { return vec4(0u); }
    return x[m * u32(COLS / 16) + at];
#else
    var words = vec4(0u);
#repeat i 4
    if (4u * at + i < u32(COLS / 4)) { words[i] = x[m * u32(COLS / 4) + 4u * at + i]; }
#end
    return words;
#endif
}
