// dense_matmul of f16 weights for several rows of x, on the matrix units. x is f32: a row goes in scaled by the power of two that
// brings its greatest magnitude to 2^14 ... 2^15, as the sum of two halves; what is lost is under 2^-22 of an element, or 2^-39 of
// the greatest.
//
// A work-group has WARPS warps of 32 weight rows, and NT * 8 rows of x in local memory, CHUNK columns at a time. As in
// ternary_decode_mma, a work-item takes 16 bytes of weights as they lie, and x follows the order of K that this gives.
#include "nvidia/warps.clh"

#define CHUNK 64
#define UNITS (CHUNK / 8) /* of 16 bytes, of a half row; those of odd rows of x are exchanged, so that a warp's loads fall into all banks */
#define LOADS (CHUNK / 32)
#define STAGE (NT * 16 * UNITS)
#define X_AT(r, unit) ((r) * UNITS + ((unit) ^ (r) / 2 % 2 * 4)) /* r: a half row */

// Each row of x as two rows of halves, and the power of two by which it was scaled. One work-group a row.
kernel __attribute__((reqd_work_group_size(WARP *WARPS, 1, 1))) OF_WARPS void split_rows(
    global const int *step, global const float *x, global half *split, global float *scales) {
    local float2 scratch[WARP * WARPS];
    int r = get_group_id(0), there = r < STEP_ROWS(step);
    if (!there) return;
    global const float *from = x + (size_t)r * COLS;
    float largest = 0.0f;
    for (int k = get_local_id(0); k < COLS; k += WARP * WARPS) largest = fmax(largest, fabs(from[k]));
    largest = group_max(largest, scratch);
    int exponent = min(max((int)(as_uint(largest) >> 23), 15), 253);  // infinities and zeros too
    float scale = as_float((uint)(254 - exponent) << 23) * 16384.0f;
    for (int k = get_local_id(0); k < COLS; k += WARP * WARPS) {
        size_t to = (size_t)r * 2 * COLS + k;
        uint high = halves(from[k] * scale, 0.0f);
        ((global ushort *)split)[to] = (ushort)high;
        ((global ushort *)split)[to + COLS] = (ushort)halves(from[k] * scale - half_of(high), 0.0f);
    }
    if (get_local_id(0) == 0) scales[r] = scale;
}

inline void fetch_x(local uint4 *tiles, int k, global const half *split, int first, int count) {
    for (int i = get_local_id(0); i < NT * 16 * UNITS && k < COLS; i += WARP * WARPS) {
        int r = i / UNITS, at = k + i % UNITS * 8, there = r / 2 < count && at < COLS;
        global const ushort *from = (global const ushort *)split + (there ? (size_t)(first * 2 + r) * COLS + at : 0);
        copy_async(tiles + k / CHUNK % 2 * STAGE + X_AT(r, i % UNITS), from, there);
    }
}

kernel __attribute__((reqd_work_group_size(WARP *WARPS, 1, 1))) OF_WARPS void dense_mma(
    global const int *step, global const half *split, global const float *scales, global const uint4 *weight, global float *out,
    int rows) {
    local uint4 tiles[2 * STAGE];
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = (get_group_id(0) * WARPS + warp) * 32 + group, first = get_group_id(1) * NT * 8, count = STEP_ROWS(step) - first;
    if (count <= 0) return;
    uint4 next[4][LOADS];  // for the rows n0, n0 + 8, n0 + 16, n0 + 24
#define FETCH(k, i)                                                                                                    \
    UNROLL                                                                                                             \
    for (int h = 0; h < 4; h++) {                                                                                      \
        int unit = (k) / 8 + (i) * 4 + quarter;                                                                        \
        next[h][i] = unit < COLS / 8 ? stream(weight + (size_t)min(n0 + 8 * h, rows - 1) * (COLS / 8) + unit) : (uint4)(0); \
    }
    UNROLL
    for (int i = 0; i < LOADS; i++) {
        FETCH(0, i)
    }
    fetch_x(tiles, 0, split, first, count);
    float4 sums[2][NT];
    UNROLL
    for (int h = 0; h < 2; h++)
        UNROLL
        for (int t = 0; t < NT; t++) sums[h][t] = (float4)(0.0f);
    for (int k = 0; k < COLS; k += CHUNK) {
        COPY_COMMIT;
        COPY_WAIT(0);
        barrier(CLK_LOCAL_MEM_FENCE);
        fetch_x(tiles, k + CHUNK, split, first, count);
        local const uint4 *tile = tiles + k / CHUNK % 2 * STAGE;
        UNROLL
        for (int i = 0; i < LOADS; i++) {
            UNROLL
            for (int t = 0; t < NT * 2; t++) {
                uint4 v = tile[X_AT(t / 2 * 16 + group * 2 + t % 2, i * 4 + quarter)];
                UNROLL
                for (int h = 0; h < 2; h++) {
                    uint4 a = next[2 * h][i], b = next[2 * h + 1][i];
                    sums[h][t / 2] = mma_f16(sums[h][t / 2], a.x, b.x, a.y, b.y, v.x, v.y);
                    sums[h][t / 2] = mma_f16(sums[h][t / 2], a.z, b.z, a.w, b.w, v.z, v.w);
                }
            }
            FETCH(k + CHUNK, i)  // into the registers that are free now: with more, one group fewer fits a compute unit
        }
    }
    UNROLL
    for (int t = 0; t < NT; t++) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            int r = t * 8 + quarter * 2 + i;
            if (r >= count) continue;
            float undo = 1.0f / scales[first + r];
            UNROLL
            for (int h = 0; h < 2; h++) {
                int n = n0 + 16 * h;
                global float *to = out + (size_t)(first + r) * rows + n;
                if (n < rows) to[0] = (i ? sums[h][t].y : sums[h][t].x) * undo;
                if (n + 8 < rows) to[8] = (i ? sums[h][t].w : sums[h][t].z) * undo;
            }
        }
    }
}
