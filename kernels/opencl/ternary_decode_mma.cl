// ternary_decode on the matrix units: a warp multiplies a tile of 16 rows of W with up to 8 tokens. The products do not mind in
// which order K is walked, so each work-item takes 16 bytes of codes as they lie in memory and masks out one of the four bit pairs
// at a time (a code then counts 1, 4, 16 or 64 fold, undone at the end, exactly), and the activations follow the same order. KSPLIT
// warps share a tile's K; all of a warp's codes are fetched before anything else.
//
// INPUT and GLU as in ternary_decode; with GLU a tile is 8 gates and their 8 ups.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` on its own

#define CHUNKS (ROW_BYTES / 16)
#define ITERS ((CHUNKS + 4 * KSPLIT - 1) / (4 * KSPLIT))
#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define X_WORDS ((CHUNKS + 3) / 4 * 64) /* of a token: whole iterations */
#define VECTORS ((COLS / 4 + THREADS - 1) / THREADS)

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void ternary_decode_mma(
    global const int *step, global const void *input, global const float *scale, global const int *x_sums,
    global const float *norm, float eps, global const uint4 *codes, global const float *w_scale, global float *out, int rows) {
#if KSPLIT > 1
    local int4 parts[WARPS][WARP];
#endif
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    int tile = get_group_id(0) * TILES + warp / KSPLIT, part = warp % KSPLIT;
    int row_low = GLU ? tile * 8 + group : tile * 16 + group, row_high = GLU ? rows / 2 + row_low : row_low + 8;
    uint4 low[ITERS], high[ITERS];
    global const uint4 *codes_low = codes + (size_t)min(row_low, rows - 1) * CHUNKS;
    global const uint4 *codes_high = codes + (size_t)min(row_high, rows - 1) * CHUNKS;
    UNROLL
    for (int i = 0; i < ITERS; i++) {
        int chunk = min((part + i * KSPLIT) * 4 + quarter, CHUNKS - 1);  // past the last, the last's again: met by zeros of x
        low[i] = stream(codes_low + chunk);
        high[i] = stream(codes_high + chunk);
    }
    float scale_low = w_scale[min(row_low, rows - 1)], scale_high = w_scale[min(row_high, rows - 1)];
    int tokens = STEP_TOKENS(step);
    // What the end needs, while nothing waits for it.
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
#if INPUT
    // Absmax int8 of the row, after RMSNorm where INPUT is 2. The norm is one factor of the whole row, so that the mean square and
    // the greatest magnitude can be found together.
    local uint4 x[X_WORDS / 4];
    local float2 found_parts[WARPS];
    local int sum_parts[WARPS];
    float4 v[VECTORS];
    float squares = 0.0f, largest = 0.0f;
    UNROLL
    for (int i = 0; i < VECTORS; i++) {
        int k = item + i * THREADS;
        v[i] = k < COLS / 4 ? ((global const float4 *)input)[k] : (float4)(0.0f);
#if INPUT == 2
        squares += dot(v[i], v[i]);
        if (k < COLS / 4) v[i] *= ((global const float4 *)norm)[k];
#endif
        largest = fmax(largest, magnitude(v[i]));
    }
#if INPUT == 2
    squares = warp_add(squares);
#endif
    largest = warp_max(largest);
    if (lane == 0) found_parts[warp] = (float2)(squares, largest);
    barrier(CLK_LOCAL_MEM_FENCE);
    squares = largest = 0.0f;
    UNROLL
    for (int w = 0; w < WARPS; w++) {
        squares += found_parts[w].x;
        largest = fmax(largest, found_parts[w].y);
    }
    float inverse = INPUT == 2 ? 1.0f / sqrt(squares / COLS + eps) : 1.0f;
    largest = fmax(largest * inverse, QUANT_FLOOR);
    float factor = 127.0f / largest * inverse;
    int sum = 0;
    UNROLL
    for (int i = 0; i < VECTORS; i++) {
        int k = item + i * THREADS;
        uint word = as_uint(convert_char4_sat_rte(v[i] * factor));
        if (k < X_WORDS) ((local uint *)x)[k] = word;
        sum = dot4(0x01010101u, word, sum);  // beyond K the values are zero
    }
    for (int k = VECTORS * THREADS + item; k < X_WORDS; k += THREADS) ((local uint *)x)[k] = 0;
    sum = warp_sum(sum);
    if (lane == 0) sum_parts[warp] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    x_scale[0] = largest / 127.0f;
    UNROLL
    for (int w = 0; w < WARPS; w++) x_sum[0] += sum_parts[w];
#endif

    int4 sums[4] = {(int4)(0), (int4)(0), (int4)(0), (int4)(0)};
    UNROLL
    for (int i = 0; i < ITERS; i++) {
        int chunk = (part + i * KSPLIT) * 4 + quarter, k = chunk / 2 * 128 + chunk % 2 * 16;
        UNROLL
        for (int plane = 0; plane < 4; plane++) {
            uint mask = 0x03030303u << (6 - 2 * plane);
            uint4 b = (uint4)(0);
#if INPUT
            if (group == 0 && chunk < CHUNKS) b = x[k / 16 + 2 * plane];
#else
            if (group < TOKENS && chunk < CHUNKS) b = load_x(input, group, k + 32 * plane);
#endif
            sums[plane] = mma_int8(sums[plane], low[i].x & mask, high[i].x & mask, low[i].y & mask, high[i].y & mask, b.x, b.y);
            sums[plane] = mma_int8(sums[plane], low[i].z & mask, high[i].z & mask, low[i].w & mask, high[i].w & mask, b.z, b.w);
        }
    }
    int4 total = sums[3] + (sums[2] >> 2) + (sums[1] >> 4) + (sums[0] >> 6);
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
