// ternary_matmul for up to 8 tokens, on the tensor cores, fused with the operations before and after it where possible.
//
// A warp multiplies a tile of 16 rows of W with up to 8 tokens by mma.m16n8k32 (u8 codes x s8 activations). The dot product
// does not mind in which order K is walked, so each thread takes 16 bytes of codes as they lie in memory, masks out one of the
// four bit pairs at a time (a code then counts 1-, 4-, 16- or 64-fold, undone at the end, exactly), and the activations follow the
// same order. KSPLIT warps share a tile's K. All of a warp's codes are fetched before the kernel waits for its predecessor,
// so that the memory streams while the chain of small dependent kernels goes on (programmatic dependent launch).
//
// INPUT 0: x is int8 with a scale and a sum for each of up to TOKENS tokens. 1: x is f32: absmax int8 here. 2: the same after RMSNorm.
// CLUSTER: the blocks of a cluster quantise one token each, and give it to all; or there is one token, and each block does so.
// GLU: rows 0..rows/2-1 of W are gates, the others their ups: a tile is 8 of each and out = act(gate) * up.
// GROUP: columns of K that share a scale of a row (64, 128 or 256); 0: one scale for all. A warp's step of 256 columns is two blocks
// of 128, whose products a token's two columns of the mma keep apart: in each, the other block's activations are zeros. The terms of
// all groups lie in shared memory, where one thread a row and token adds them in their order. A code's two bits 0, 1, 2 become two's
// complement, all sixteen of a word at once; a bit pair at the top of its byte then counts 64-fold, which the terms undo exactly.
#define CHUNKS (ROW_BYTES / 16)
#define ITERS ((CHUNKS + 4 * KSPLIT - 1) / (4 * KSPLIT))
#define WARPS (TILES * KSPLIT)
#define THREADS (WARP * WARPS)
#define UNIT (COLS % 16 ? 4 : 16) /* bytes of x copied at a time */
#define X_BYTES ((CHUNKS + 3) / 4 * 256) /* bytes of a token in shared memory: whole iterations */
#define STRIDE (X_BYTES + 64) /* so that neighbouring tokens fall into different halves of the banks */
#define VECTORS VECTORS_OF(COLS, THREADS)
#define UNITS (X_BYTES / 16)
#if GROUP
#define PER (256 / GROUP) /* groups of a step of 256 columns */
#define COUNT (COLS / GROUP)
#define PITCH (COUNT | 1) /* of a row's terms, odd so that neighbours fall into different banks */
#define PASSES ((TOKENS + 3) / 4) /* of four tokens with two columns each */
#define SETS (GROUP == 64 ? 2 : 1) /* groups of a block */
#endif
#define COLUMNS (TOKENS == 1 ? 1 : 2) /* tokens of a thread's results */
#define HOLDERS (TOKENS == 1 ? WARP / 4 : WARP) /* threads of a warp that have results */
#define WHOLE(i) (((i) + 1) * KSPLIT * 4 <= CHUNKS) /* all warps have work in iteration i */
#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

#if GROUP
#define CODES "s8"
#else
#define CODES "u8"
#endif
__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." CODES ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Place in shared memory of the 16 bytes of x at 16 * unit. With several tokens, the bytes that the four quarters take at a
// time are together, so that the loads of a warp fall into all banks.
__device__ __forceinline__ unsigned place(unsigned unit) { return TOKENS == 1 && INPUT && !GROUP ? unit : unit & ~14u | (unit & 6) << 1 | unit >> 2 & 2; }

#if GROUP
#if PER == 4
typedef uint2 Scales;
#elif PER == 2
typedef unsigned Scales;
#else
typedef unsigned short Scales;
#endif

// One bit pair of every byte, moved to the byte's top. Codes of weights with groups are two's complement, so this is 64 times the weight.
__device__ __forceinline__ uint4 pairs_at(uint4 w, int shift) {
    const unsigned mask = 0xC0C0C0C0u;
    return make_uint4(w.x << shift & mask, w.y << shift & mask, w.z << shift & mask, w.w << shift & mask);
}

// The products of one thread's 16 bytes of two rows with the activations of the same places.
__device__ __forceinline__ void multiply(int (&sums)[PASSES][SETS][4], uint4 low, uint4 high, const signed char *const (&x)[PASSES], int at) {
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
        uint4 a = pairs_at(low, 2 * plane), b = pairs_at(high, 2 * plane);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            uint4 v = *(const uint4 *)(x[pass] + at + 64 * plane);
            int(&sum)[4] = sums[pass][plane * SETS / 4];
            mma(sum, a.x, b.x, a.y, b.y, v.x, v.y);
            mma(sum, a.z, b.z, a.w, b.w, v.z, v.w);
        }
    }
}
#else
// The products of one thread's 16 bytes of two rows with the activations of the same places, by half of the bytes and bit pair:
// no product has to wait for the one before.
__device__ __forceinline__ void multiply(int (&sums)[2][4][4], uint4 low, uint4 high, const signed char *x) {
    uint4 b[4];
#pragma unroll
    for (int plane = 0; plane < 4; plane++) b[plane] = *(const uint4 *)(x + (TOKENS == 1 && INPUT ? 32 : 64) * plane);
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
        unsigned mask = 0x03030303u << (6 - 2 * plane);
        mma(sums[0][plane], low.x & mask, high.x & mask, low.y & mask, high.y & mask, b[plane].x, b[plane].y);
    }
#pragma unroll
    for (int plane = 0; plane < 4; plane++) {
        unsigned mask = 0x03030303u << (6 - 2 * plane);
        mma(sums[1][plane], low.z & mask, high.z & mask, low.w & mask, high.w & mask, b[plane].z, b[plane].w);
    }
}

// A thread's results of rows low and high.
struct __align__(8 * COLUMNS) Results {
    int low[COLUMNS], high[COLUMNS];
};
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS)
ternary_decode(const int *step, const void *input, const float *scale, const int *input_sums, const float *norm, float eps,
               const uint4 *codes, const void *w_scale, float *out, int rows) {
    extern __shared__ __align__(16) signed char x_shared[];  // [TOKENS][STRIDE], and the terms of groups
#if GROUP
    __shared__ uint4 zeros[16];
    float *terms = (float *)(x_shared + TOKENS * STRIDE);  // [2][TILES * 16][TOKENS][PITCH]
    if (threadIdx.x < 16) zeros[threadIdx.x] = make_uint4(0, 0, 0, 0);
#else
    __shared__ Results parts[WARPS][HOLDERS];
#endif
    __builtin_assume(threadIdx.x < THREADS);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int tile = blockIdx.x * TILES + warp / KSPLIT, part = warp % KSPLIT;
#if !GROUP
    int row_low = GLU ? tile * 8 + group : tile * 16 + group;
    int row_high = GLU ? rows / 2 + row_low : row_low + 8;
#endif

    uint4 low[ITERS], high[ITERS];
#if GROUP
    int all = (rows + 15) / 16;  // tiles
    Scales scales_low[ITERS], scales_high[ITERS];
    auto fetch = [&](int tile) {
        int from_low = min(GLU ? tile * 8 + group : tile * 16 + group, rows - 1), from_high = min(GLU ? rows / 2 + from_low : from_low + 8, rows - 1);
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            int at = min(part + i * KSPLIT, COLS / 256 - 1);
            low[i] = stream(codes + (size_t)from_low * CHUNKS + at * 4 + quarter);
            high[i] = stream(codes + (size_t)from_high * CHUNKS + at * 4 + quarter);
            scales_low[i] = ((const Scales *)w_scale)[(size_t)from_low * (COLS / 256) + at];
            scales_high[i] = ((const Scales *)w_scale)[(size_t)from_high * (COLS / 256) + at];
        }
    };
    fetch(tile);
#else
    const uint4 *codes_low = codes + (size_t)min(row_low, rows - 1) * CHUNKS;
    const uint4 *codes_high = codes + (size_t)min(row_high, rows - 1) * CHUNKS;
#pragma unroll
    for (int i = 0; i < ITERS; i++) {
        int chunk = (part + i * KSPLIT) * 4 + quarter;
        bool there = WHOLE(i) || chunk < CHUNKS;
        low[i] = there ? stream(codes_low + chunk) : make_uint4(0, 0, 0, 0);
        high[i] = there ? stream(codes_high + chunk) : make_uint4(0, 0, 0, 0);
    }
    const unit_t *units = (const unit_t *)w_scale;
    float scale_low = to_float(units[min(row_low, rows - 1)]), scale_high = to_float(units[min(row_high, rows - 1)]);
#endif
    int tokens = TOKENS == 1 ? 1 : STEP_TOKENS(step);
#if INPUT
    __shared__ __align__(16) int warp_sums[WARPS];
#if CLUSTER > 1
    __shared__ unsigned long long rows_there;
#endif
    int token = CLUSTER > 1 ? blockIdx.x % CLUSTER : 0;  // the token that this block quantises; also its rank
    float4 v[VECTORS], gain[VECTORS];
#if INPUT == 2
#pragma unroll
    for (int i = 0; i < VECTORS; i++) gain[i] = vector_or_zero(norm, threadIdx.x + i * THREADS, COLS);
#endif
#endif
    start_dependents();
#if CLUSTER > 1
    if (threadIdx.x == 0) init_barrier(&rows_there);
    cluster_arrive();
#endif
    wait_for_before();

    // Rows past the step's tokens repeat the last one, and are not stored.
#if INPUT
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = vector_or_zero((const float *)input + (size_t)min(token, tokens - 1) * COLS, threadIdx.x + i * THREADS, COLS);
#else
#pragma unroll
    for (unsigned i = threadIdx.x; i < TOKENS * (X_BYTES / UNIT); i += THREADS) {
        unsigned m = i / (X_BYTES / UNIT), at = i % (X_BYTES / UNIT) * UNIT;
        const signed char *from = (const signed char *)input + (size_t)min((int)m, tokens - 1) * COLS + at;
        signed char *to = x_shared + m * STRIDE + place(at / 16) * 16 + at % 16;
        if (UNIT == 16) copy_async(to, at < COLS ? from : (const signed char *)input, at < COLS);
        else *(int *)to = at < COLS ? *(const int *)from : 0;
    }
#if !GROUP
    float x_scale[COLUMNS] = {};
    int x_sum[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        if (quarter * 2 + i < tokens) x_scale[i] = scale[quarter * 2 + i], x_sum[i] = input_sums[quarter * 2 + i];
    }
#endif
#endif
#if ADD && !GROUP
    float old_low[COLUMNS] = {}, old_high[COLUMNS] = {};
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        size_t row = (size_t)(quarter * 2 + i) * rows;
        if (part == 0 && quarter * 2 + i < tokens && row_low < rows) old_low[i] = out[row + row_low];
        if (part == 0 && quarter * 2 + i < tokens && row_high < rows) old_high[i] = out[row + row_high];
    }
#endif
#if INPUT
    signed char *x_row = x_shared + token * STRIDE;
    int sum = 0;
    float s = norm_quant_row<WARPS, INPUT == 2>(v, gain, COLS, eps, [&](unsigned k, int word) {
        if (k < UNITS * 4) ((int *)x_row)[place(k / 4) * 4 + k % 4] = word;
        sum = dot_ones(word, sum);  // beyond K the values are zero
    });
    for (unsigned k = VECTORS * THREADS + threadIdx.x; k < UNITS * 4; k += THREADS) ((int *)x_row)[place(k / 4) * 4 + k % 4] = 0;
    sum = warp_sum(sum);
    if (lane == 0) warp_sums[warp] = sum;
#if CLUSTER > 1
    before_sending();
#endif
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += warp_sums[w];
#if CLUSTER > 1
    cluster_wait();
    if (warp == 0) {
        if (lane == 0) {
            *(int2 *)(x_row + X_BYTES) = make_int2(sum, __float_as_int(s));
            expect_bytes(&rows_there, (CLUSTER - 1) * (X_BYTES + 16));
        }
        before_sending();
        __syncwarp();
        if (lane < CLUSTER - 1) send_bytes(x_row, X_BYTES + 16, (token + 1 + lane) % CLUSTER, &rows_there);
    }
    wait_for_bytes(&rows_there);
    cluster_arrive();
#endif
#else
    asm volatile("cp.async.wait_all;");
    __syncthreads();
#endif

#if GROUP
    const signed char *x[PASSES];
    int stride = quarter / 2 == group % 2 ? KSPLIT * 256 : 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const signed char *row = x_shared + min(group / 2 + 4 * pass, TOKENS - 1) * STRIDE + part * 256 + 16 * quarter;
        x[pass] = stride ? row : (const signed char *)zeros;
    }
    // The next tile's codes and scales are on their way while this one's are multiplied. Its terms have the other half of the memory.
    for (int round = 0;; round++) {
        uint4 low_now[ITERS], high_now[ITERS];
        Scales scales_low_now[ITERS], scales_high_now[ITERS];
        int first = tile - warp / KSPLIT, next = tile + gridDim.x * TILES;
        float *terms_now = terms + round % 2 * (TILES * 16 * TOKENS * PITCH);
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            low_now[i] = low[i], high_now[i] = high[i], scales_low_now[i] = scales_low[i], scales_high_now[i] = scales_high[i];
        }
        if (first + gridDim.x * TILES < all) fetch(next);
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            if (!WHOLE(i) && (part + i * KSPLIT) * 4 >= CHUNKS) break;
            int sums[PASSES][SETS][4] = {};
            multiply(sums, low_now[i], high_now[i], x, i * stride);
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) {
                if (quarter + 4 * pass >= TOKENS) continue;
                float *to = terms_now + ((warp / KSPLIT * 16 + group) * TOKENS + quarter + 4 * pass) * PITCH + (part + i * KSPLIT) * PER;
#pragma unroll
                for (int g = 0; g < PER; g++) {
                    int(&sum)[4] = sums[pass][g % SETS];
                    int half = g / SETS, value_low = sum[half], value_high = sum[2 + half];
                    if (PER == 1) value_low += sum[1], value_high += sum[3];
                    to[g] = __fmul_rn((float)value_low, to_float(((const f16 *)&scales_low_now[i])[g]) * (1.0f / 64));
                    to[8 * TOKENS * PITCH + g] = __fmul_rn((float)value_high, to_float(((const f16 *)&scales_high_now[i])[g]) * (1.0f / 64));
                }
            }
        }
        __syncthreads();
        // Another warp each time, as the others go on.
        for (int i = (threadIdx.x + round % WARPS * WARP) % THREADS; i < TILES * 8 * TOKENS; i += THREADS) {
            int m = i % TOKENS, r = i / TOKENS % 8, t = i / TOKENS / 8;
            int row_low = GLU ? (first + t) * 8 + r : (first + t) * 16 + r, row_high = GLU ? rows / 2 + row_low : row_low + 8;
            if (m >= tokens || row_low >= (GLU ? rows / 2 : rows)) continue;
            float *to_low = out + (size_t)m * (GLU ? rows / 2 : rows) + row_low;
            [[maybe_unused]] float *to_high = to_low + 8;
            [[maybe_unused]] bool high_there = row_high < rows;
#if ADD
            float old_low = *to_low, old_high = high_there ? *to_high : 0.0f;
#endif
            const float *from_low = terms_now + ((t * 16 + r) * TOKENS + m) * PITCH, *from_high = from_low + 8 * TOKENS * PITCH;
            float value_low = 0.0f, value_high = 0.0f;
#pragma unroll 32
            for (int g = 0; g < COUNT; g++) value_low = __fadd_rn(value_low, from_low[g]), value_high = __fadd_rn(value_high, from_high[g]);
#if CLUSTER > 1
            float x_scale = __int_as_float(((const int2 *)(x_shared + m * STRIDE + X_BYTES))->y);
#elif INPUT
            float x_scale = s;
#else
            float x_scale = scale[m];
#endif
            value_low = __fmul_rn(value_low, x_scale), value_high = __fmul_rn(value_high, x_scale);
#if GLU
            *to_low = act(value_low) * value_high;
#elif ADD  // the contract rounds this sum separately
            *to_low = __fadd_rn(old_low, value_low);
            if (high_there) *to_high = __fadd_rn(old_high, value_high);
#else
            *to_low = value_low;
            if (high_there) *to_high = value_high;
#endif
        }
        if (first + gridDim.x * TILES >= all) break;
        tile = next;
    }
#else
    int sums[2][4][4] = {};
    // Columns past the tokens multiply another token's data, and their results are not read.
    const signed char *x = x_shared + min(group, TOKENS - 1) * STRIDE + part * 256 + 16 * place(quarter / 2 * 8 + quarter % 2);
#pragma unroll
    for (int i = 0; i < ITERS; i++) {
        if (!WHOLE(i) && (part + i * KSPLIT) * 4 >= CHUNKS) break;
        multiply(sums, low[i], high[i], x + i * KSPLIT * 256);
    }
    auto total_of = [&](int n) {
        int of[4];
#pragma unroll
        for (int plane = 0; plane < 4; plane++) of[plane] = sums[0][plane][n] + sums[1][plane][n];
        return of[3] + (of[2] >> 2) + (of[1] >> 4) + (of[0] >> 6);
    };
    Results total;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) total.low[i] = total_of(i), total.high[i] = total_of(2 + i);
    bool holds = TOKENS > 1 || quarter == 0;
    if (KSPLIT > 1) {
        Results *shares = &parts[warp][lane * HOLDERS / WARP];
        if (holds) *shares = total;
        __syncthreads();
        if (part) return;
#pragma unroll
        for (int w = 1; w < KSPLIT; w++) {
            Results other = shares[w * HOLDERS];
#pragma unroll
            for (int i = 0; i < COLUMNS; i++) total.low[i] += other.low[i], total.high[i] += other.high[i];
        }
    }
    if (!holds) return;
#if INPUT
    float x_scale[COLUMNS];
    int x_sum[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
#if CLUSTER > 1
        int2 sent = *(const int2 *)(x_shared + min(quarter * 2 + i, TOKENS - 1) * STRIDE + X_BYTES);
        x_sum[i] = sent.x, x_scale[i] = __int_as_float(sent.y);
#else
        x_scale[i] = s, x_sum[i] = sum;
#endif
    }
#endif
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        int m = quarter * 2 + i;
        if (m >= tokens) break;
        float value_low = dequantize(total.low[i] - x_sum[i], x_scale[i], scale_low);
        float value_high = dequantize(total.high[i] - x_sum[i], x_scale[i], scale_high);
#if GLU
        if (row_low < rows / 2) out[(size_t)m * (rows / 2) + row_low] = act(value_low) * value_high;
#elif ADD  // the contract rounds this sum separately
        if (row_low < rows) out[(size_t)m * rows + row_low] = __fadd_rn(old_low[i], value_low);
        if (row_high < rows) out[(size_t)m * rows + row_high] = __fadd_rn(old_high[i], value_high);
#else
        if (row_low < rows) out[(size_t)m * rows + row_low] = value_low;
        if (row_high < rows) out[(size_t)m * rows + row_high] = value_high;
#endif
    }
#endif
#if CLUSTER > 1
    cluster_wait();  // a block must not end while others copy its row
#endif
}
