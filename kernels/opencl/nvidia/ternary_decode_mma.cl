// ternary_decode on the matrix units, by tiles of 16 rows of W; all of a warp's codes are fetched before anything else.
//
// INPUT and GLU as in ternary_decode, for several tokens too: a warp then quantises a token. KSPLIT warps share a tile's K.
#include "nvidia/warps.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately

#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define CHUNKS (ROW_BYTES / 16)
#define ITERS TILE_ITERS(CHUNKS, KSPLIT)
#include "nvidia/ternary_tile.clh"

#if INPUT && TOKENS > 1
// Bytes of a token in local memory, padded so that a warp's loads fall into different banks, as do four work-items' parts,
// which stand together.
#define X_PITCH (X_WORDS(CHUNKS) / 4 + 4)

// Absmax int8 of a row, after RMSNorm where INPUT is 2, by one warp. Returns its scale and its sum.
INLINED float2 quantise_by_warp(global const float4 *row, global const float4 *norm, float eps, local uint *x) {
    int lane = get_local_id(0) % WARP;
    float squares = 0.0f, largest = 0.0f;
    UNROLL_BY_8
    for (int k = lane; k < COLS / 4; k += WARP) {
        float4 v = row[k];
        squares += dot(v, v);
        largest = fmax(largest, magnitude(INPUT == 2 ? v * norm[k] : v));
    }
    float inverse = INPUT == 2 ? 1.0f / sqrt(warp_add(squares) / COLS + eps) : 1.0f;
    largest = fmax(warp_max(largest) * inverse, QUANT_FLOOR);
    float factor = 127.0f / largest * inverse;
    int sum = 0;
    UNROLL_BY_8
    for (int k = lane; k < X_WORDS(CHUNKS); k += WARP) {
        float4 v = k < COLS / 4 ? row[k] : (float4)(0.0f);
        if (INPUT == 2 && k < COLS / 4) v *= norm[k];
        uint word = as_uint(convert_char4_sat_rte(v * factor));
        int unit = k / 4 % 16, place = unit / 2 % 4 * 4 + unit / 8 * 2 + unit % 2;
        x[k / 64 * 64 + place * 4 + k % 4] = word;
        sum = dot4(0x01010101u, word, sum);
    }
    return (float2)(largest / 127.0f, (float)warp_sum(sum));  // exact: below 2^24
}
#endif

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void ternary_decode_mma(
    global const int *step, global const void *input, global const float *scale, global const int *x_sums,
    global const float *norm, float eps, global const uint4 *codes, global const float *w_scale, global float *out, int rows) {
#if KSPLIT > 1
    local int4 parts[WARPS][WARP];
#endif
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    int tile = get_group_id(0) * TILES + warp / KSPLIT, part = warp % KSPLIT;
    int2 at = tile_rows(tile, rows, GLU);
    int row_low = at.x, row_high = at.y;
    uint4 low[ITERS], high[ITERS];
    fetch_tile(low, high, codes, at, rows, part, CHUNKS, KSPLIT);
    float scale_low = w_scale[min(row_low, rows - 1)], scale_high = w_scale[min(row_high, rows - 1)];
    int tokens = STEP_TOKENS(step);
    // Loads for the end of the kernel, early, while nothing waits for them.
    float x_scale[2] = {0.0f, 0.0f}, old_low[2] = {0.0f, 0.0f}, old_high[2] = {0.0f, 0.0f};
    int x_sum[2] = {0, 0};
    UNROLL
    for (int i = 0; i < 2; i++) {
        int m = quarter * 2 + i;
        if (m >= TOKENS || part) continue;
#if !INPUT
        x_scale[i] = scale[m];
        x_sum[i] = x_sums[m];
#endif
#if ADD
        old_low[i] = out[(size_t)m * rows + min(row_low, rows - 1)];
        old_high[i] = out[(size_t)m * rows + min(row_high, rows - 1)];
#endif
    }
#if INPUT && TOKENS == 1
    local uint4 x[X_WORDS(CHUNKS) / 4];
    local float2 found[WARPS];
    local int found_sums[WARPS];
    float4 v[VECTORS_OF(COLS)], gain[VECTORS_OF(COLS)];
    FETCH_ROW(gain, norm, INPUT == 2, COLS)
    FETCH_ROW(v, input, 1, COLS)
    float2 made = quantise_row(v, gain, eps, INPUT == 2, COLS, X_WORDS(CHUNKS), (local uint *)x, found, found_sums);
    x_scale[0] = made.x;
    x_sum[0] = (int)made.y;
    int4 total = multiply_tile(low, high, x, part, CHUNKS, KSPLIT);
#else
#if INPUT
    local uint4 x[TOKENS * X_PITCH];
    local float2 made[TOKENS];
    for (int t = warp; t < TOKENS; t += WARPS) {
        float2 found = quantise_by_warp((global const float4 *)input + (size_t)min(t, tokens - 1) * (COLS / 4), (global const float4 *)norm,
                                        eps, (local uint *)(x + t * X_PITCH));
        if (lane == 0) made[t] = found;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL
    for (int i = 0; i < 2; i++) {
        if (quarter * 2 + i >= TOKENS) continue;
        x_scale[i] = made[quarter * 2 + i].x;
        x_sum[i] = (int)made[quarter * 2 + i].y;
    }
#endif
    int4 sums[4] = {(int4)(0), (int4)(0), (int4)(0), (int4)(0)};
    UNROLL
    for (int i = 0; i < ITERS; i++) {
        int chunk = (part + i * KSPLIT) * 4 + quarter, there = group < TOKENS && chunk < CHUNKS;
        UNROLL
        for (int plane = 0; plane < 4; plane++) {
#if INPUT
            uint4 b = there ? x[group * X_PITCH + chunk / 4 * 16 + plane * 4 + quarter] : (uint4)(0);
#else
            uint4 b = there ? load_x(input, group, chunk / 2 * 128 + chunk % 2 * 16 + 32 * plane) : (uint4)(0);
#endif
            sums[plane] = add_tile(sums, low[i], high[i], b, plane);
        }
    }
    int4 total = tile_total(sums);
#endif
#if KSPLIT > 1
    parts[warp][lane] = total;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (part) return;
    UNROLL
    for (int i = 1; i < KSPLIT; i++) total += parts[warp + i][lane];
#endif
    // x, y: row_low with tokens 2q, 2q + 1; z, w: row_high.
    int lows[2] = {total.x, total.y}, highs[2] = {total.z, total.w};
    UNROLL
    for (int i = 0; i < 2; i++) {
        int m = quarter * 2 + i;
        if (m >= tokens || m >= TOKENS) continue;
        float value_low = (float)(lows[i] - x_sum[i]) * (x_scale[i] * scale_low);
        float value_high = (float)(highs[i] - x_sum[i]) * (x_scale[i] * scale_high);
#if GLU
        if (row_low < rows / 2) out[(size_t)m * (rows / 2) + row_low] = act(value_low) * value_high;
#elif ADD
        if (row_low < rows) out[(size_t)m * rows + row_low] = old_low[i] + value_low;
        if (row_high < rows) out[(size_t)m * rows + row_high] = old_high[i] + value_high;
#else
        if (row_low < rows) out[(size_t)m * rows + row_low] = value_low;
        if (row_high < rows) out[(size_t)m * rows + row_high] = value_high;
#endif
    }
}
