// The normalised Walsh-Hadamard transform of each BLOCK neighbours of a row, in place. One work-group a block. SIGNS: 1 before, 2 after it,
// 0 none. ROWS: of the rows that need logits, else of tokens. Strides up to a tile's are taken in local memory.
#define MAX_TILE 2048

kernel void hadamard(global const int *step, global const float *signs, global float *rows, int width) {
    local float tile[MAX_TILE];
    int row = get_group_id(1), lane = get_local_id(0), size = min(BLOCK, MAX_TILE);
    int count = row < (ROWS ? STEP_ROWS(step) : STEP_TOKENS(step)) ? BLOCK : 0;  // not a return: see expert_matmul.cl
    global float *block = rows + (size_t)row * width + get_group_id(0) * BLOCK;
    signs += SIGNS ? get_group_id(0) * BLOCK : 0;
    for (int from = 0; from < count; from += size) {
        for (int i = lane; i < size; i += WG) tile[i] = block[from + i] * (SIGNS == 1 ? signs[from + i] : 1.0f);
        for (int stride = 1; stride < size; stride *= 2) {
            barrier(CLK_LOCAL_MEM_FENCE);
            for (int i = lane; i < size / 2; i += WG) {
                int low = 2 * i - (i & stride - 1);
                float a = tile[low], b = tile[low + stride];
                tile[low] = a + b;
                tile[low + stride] = a - b;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = lane; i < size; i += WG) block[from + i] = tile[i];
        barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    }
    for (int stride = size; stride < count; stride *= 2) {
        for (int i = lane; i < BLOCK / 2; i += WG) {
            int low = 2 * i - (i & stride - 1);
            float a = block[low], b = block[low + stride];
            block[low] = a + b;
            block[low + stride] = a - b;
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
    }
    float unit = 1.0f / sqrt((float)BLOCK);
    for (int i = lane; i < count; i += WG) block[i] *= unit * (SIGNS == 2 ? signs[i] : 1.0f);
}
