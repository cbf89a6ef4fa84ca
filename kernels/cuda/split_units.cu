// Rows of x for table_mma: each of their elements as the sum of two halves. One block a row, a warp for each 128 columns.
//
// A UNIT of columns, those that share a scale of the table or 128, is scaled by a power of two of its own: an element that outweighs all
// others costs only its own unit precision. `units` gets the factors that undo this. Columns are in the order in which table_mma's
// threads take them.
#include "dense.cuh"
#include "table_mma.cuh"
#define THREADS 256
#define ROUNDS ((COLS / 128 + THREADS / WARP - 1) / (THREADS / WARP))

extern "C" __global__ void __launch_bounds__(THREADS)
split_units(const int *step, const float *x, uint2 *split, float *units) {
    int r = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float4 *row = (const float4 *)(x + (size_t)r * COLS);
    // A lane has the four columns of one word's bit pair.
    int word = lane % 8, pair = 3 - lane / 8, at = ((word % 2 * 2 + pair / 2) * 4 + word / 2) * 2 + pair % 2;
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int block = warp + i * (THREADS / WARP);
        if (block >= COLS / 128) break;
        float4 v = row[block * 32 + lane];
        float largest = magnitude(v);
        for (int j = UNIT / 8; j > 0; j /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, j));
        float scale = split_scale(largest);
        f16 halves[2][4];
        split_store(&halves[0][0], 4, v.x * scale);
        split_store(&halves[0][1], 4, v.z * scale);
        split_store(&halves[0][2], 4, v.y * scale);
        split_store(&halves[0][3], 4, v.w * scale);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint2 both = make_uint2(halves[h][0].bits | halves[h][1].bits << 16, halves[h][2].bits | halves[h][3].bits << 16);
            split[((size_t)r * 2 + h) * (COLS / 4) + block * 32 + at] = both;
        }
        if (lane % (UNIT / 4) == 0) units[(size_t)r * UNITS + (block * 32 + lane) / (UNIT / 4)] = 1.0f / scale;
    }
}
