// embed from a ternary table with a scale for each GROUP of columns: out[m] = (code - 1) * w_scale of row tokens[m]. One work-group a token.
kernel void table_embed(
    global const int *step, int tokens, global const uint *codes, global const half *w_scale, global float *out) {
    int m = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    size_t row = step[tokens + m];
    for (int k = 4 * get_local_id(0); k < COLS; k += 4 * get_local_size(0)) {
        uint word = codes[row * (ROW_BYTES / 4) + k / 128 * 8 + k % 32 / 4] >> (6 - k % 128 / 32 * 2);
        float4 weights = convert_float4(as_uchar4(word & 0x03030303u)) - 1.0f;
        *(global float4 *)(out + m * (size_t)COLS + k) = weights * vload_half(row * (COLS / GROUP) + k / GROUP, w_scale);
    }
}
