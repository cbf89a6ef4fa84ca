// Operands of products of blocks of 128 columns. Declared before it: COLS, and x, which has uvec4 where WIDE, else uint.

// 16 activations of a token, from 16 at on; zeros beyond COLS.
uvec4 load_x(uint m, uint at) {
#if WIDE
    return COLS % 128 == 0 || at < COLS / 16 ? x[m * (COLS / 16) + at] : uvec4(0);
#else
    uvec4 words;
    [[unroll]] for (uint j = 0; j < 4; j++) words[j] = 4 * at + j < COLS / 4 ? x[m * (COLS / 4) + 4 * at + j] : 0;
    return words;
#endif
}

int dot16(uvec4 a, uvec4 b, int sum) { return dot4(a.w, b.w, dot4(a.z, b.z, dot4(a.y, b.y, dot4(a.x, b.x, sum)))); }

// The weights of plane 0 (the top bit pair) to 3 of a vector of codes, as signed bytes.
uvec4 plane_of(uvec4 quad, int plane) {
    return uvec4(weights_of(quad.x, 3 - plane), weights_of(quad.y, 3 - plane), weights_of(quad.z, 3 - plane), weights_of(quad.w, 3 - plane));
}
