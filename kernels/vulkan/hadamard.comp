// The normalised Walsh-Hadamard transform of each BLOCK neighbours of a row, in place. One work-group a block. SIGNS: 1 before, 2 after it,
// 0 none. ROWS: of the rows that need logits, else of tokens. Strides up to a tile's are taken in shared memory.
layout(constant_id = 1) const int BLOCK = 1024;
layout(constant_id = 2) const int ROWS = 0;
layout(constant_id = 3) const int SIGNS = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, signs);
BUFFER(2, coherent, float, rows);
layout(push_constant) uniform Push { int width; };

const int TILE = BLOCK < 2048 ? BLOCK : 2048;
shared float tile[TILE];

// The first member of pair i at a distance of `stride`.
int low_of(int i, int stride) { return 2 * i - (i & stride - 1); }

KERNEL(hadamard) {
    int row = int(gl_WorkGroupID.y), lane = int(gl_LocalInvocationID.x), sign_from = int(gl_WorkGroupID.x) * BLOCK;
    if (row >= (ROWS != 0 ? STEP_ROWS : STEP_TOKENS)) return;
    uint block = uint(row) * width + sign_from;
    for (int from = 0; from < BLOCK; from += TILE) {
        for (int i = lane; i < TILE; i += WG)
            tile[i] = rows[block + from + i] * (SIGNS == 1 ? signs[sign_from + from + i] : 1.0);
        for (int stride = 1; stride < TILE; stride *= 2) {
            barrier();
            for (int i = lane; i < TILE / 2; i += WG) {
                int low = low_of(i, stride);
                float a = tile[low], b = tile[low + stride];
                tile[low] = a + b;
                tile[low + stride] = a - b;
            }
        }
        for (int i = lane; i < TILE; i += WG) rows[block + from + i] = tile[i];  // those that it has just written
    }
    for (int stride = TILE; stride < BLOCK; stride *= 2) {
        memoryBarrierBuffer();
        barrier();
        for (int i = lane; i < BLOCK / 2; i += WG) {
            uint low = block + low_of(i, stride);
            float a = rows[low], b = rows[low + stride];
            rows[low] = a + b;
            rows[low + stride] = a - b;
        }
    }
    float unit = 1.0 / sqrt(float(BLOCK));
    for (int i = lane; i < BLOCK; i += WG) rows[block + i] *= unit * (SIGNS == 2 ? signs[sign_from + i] : 1.0);
}
