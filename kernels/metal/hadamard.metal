// The normalised Walsh-Hadamard transform of each BLOCK neighbours of a row, in place. One threadgroup a block. SIGNS: 1 before, 2 after it,
// 0 none. ROWS: of the rows that need logits, else of tokens. Strides up to a tile's are taken in threadgroup memory.
#define TILE (BLOCK < 2048 ? BLOCK : 2048)

[[kernel, max_total_threads_per_threadgroup(WG)]] void hadamard(
    device const int *step [[buffer(0)]], device const float *signs [[buffer(1)]], device float *rows [[buffer(2)]],
    constant int &width [[buffer(3)]], PLACE) {
    threadgroup float tile[TILE];
    int row = int(group.y), item = int(index), from_sign = int(group.x) * BLOCK;
    if (row >= (ROWS ? STEP_ROWS(step) : STEP_TOKENS(step))) return;
    device float *block = rows + ulong(row) * ulong(width) + ulong(from_sign);
    for (int from = 0; from < BLOCK; from += TILE) {
        for (int i = item; i < TILE; i += WG) tile[i] = block[from + i] * (SIGNS == 1 ? signs[from_sign + from + i] : 1.0f);
        for (int stride = 1; stride < TILE; stride *= 2) {
            GROUP_BARRIER;
            for (int i = item; i < TILE / 2; i += WG) {
                int low = 2 * i - (i & (stride - 1));
                float a = tile[low], b = tile[low + stride];
                tile[low] = a + b;
                tile[low + stride] = a - b;
            }
        }
        for (int i = item; i < TILE; i += WG) block[from + i] = tile[i];  // those that it has just written
    }
    for (int stride = TILE; stride < BLOCK; stride *= 2) {
        threadgroup_barrier(mem_flags::mem_device);
        for (int i = item; i < BLOCK / 2; i += WG) {
            int low = 2 * i - (i & (stride - 1));
            float a = block[low], b = block[low + stride];
            block[low] = a + b;
            block[low + stride] = a - b;
        }
    }
    float unit = 1.0f / precise::sqrt(float(BLOCK));
    for (int i = item; i < BLOCK; i += WG) block[i] *= unit * (SIGNS == 2 ? signs[from_sign + i] : 1.0f);
}
