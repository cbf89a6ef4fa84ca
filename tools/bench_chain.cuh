// What bench_chain_grid.cu and bench_chain_clusters.cu share. Each computes one layer again and again in one launch, and bench_chain.py measures
// how long. Weights and the cache of the layer stay in shared memory. Gains come from the second-level cache, asked for before the wait
// that precedes their use. Each block holds the residual in registers: thread t its vectors t and t + THREADS.
//
// A unit of weights is 16 rows by 256 columns, 1,024 bytes, as a warp reads it for mma.m16n8k32: lane `group * 4 + quarter` has 16 bytes of
// row `group`, then as many of row `group + 8`. Bits 6 - 2p and 7 - 2p of byte i are the code (0, 1, 2) of column 64p + 16 quarter + i.
//
// A wait that takes more than LIMIT cycles is given up: the block notes its place, waits for nothing any more, and ends with its layer.
#define HIDDEN 2560
#define FFN 6912
#define CONTEXT 512
#define EPS 1e-5f
#define LIMIT (1ll << 31) /* cycles, about a second */
#define UNIT 64           /* vectors of 16 bytes */
#define STEP 256          /* columns */
#define MAX_SHARED (227 * 1024 - 512) /* bytes, less what the kernel declares otherwise */
#define VECTORS_X VECTORS_OF(HIDDEN, THREADS)
#define COUNTER(i) (counters + 32 * (i)) /* each in a line of its own: the grid's, those of key/value heads, failures */
#define FAILURE (1 + KV_HEADS)
#define QKV (HIDDEN + 2 * KV_HEADS * DIM)
#define TILES_OF(rows, blocks) (((rows) / 16 + (blocks) - 1) / (blocks))
#define GATE_TILES TILES_OF(2 * FFN, BLOCKS) /* of a block; such a tile is 8 gates and their 8 ups */

// Rows in shared memory lie apart so that those that a warp reads at once fall into different banks.
#define K_PITCH (DIM + 16)
#define V_PITCH (DIM + 32)
#define FRESH_PITCH (6 * 8 + 4)

// Places in `gains` and of a layer in a trace.
#define GAIN_ATTENTION 0
#define GAIN_FFN HIDDEN
#define GAIN_O (2 * HIDDEN)
#define GAIN_DOWN (3 * HIDDEN)
#define TRACE_X 0
#define TRACE_QKV HIDDEN
#define TRACE_ATTENDED (TRACE_QKV + QKV)
#define TRACE_MIDDLE (TRACE_ATTENDED + HIDDEN)
#define TRACE_GATED (TRACE_MIDDLE + HIDDEN)
#define TRACE_SCALES (TRACE_GATED + FFN)
#define TRACE_CODES (TRACE_SCALES + 4) /* bytes: three rows of HIDDEN, one of FFN */
#define TRACE_WORDS (TRACE_CODES + (3 * HIDDEN + FFN) / 4)

// Compiled in one way for each use: 0 timed, 1 with stamps of the clock, 2 with a trace of what is computed.
#define STAMP(i) \
    if (WATCH == 1 && threadIdx.x == 0) stamps[i] = clock64()
#define TRACE(at, value) \
    if (WATCH == 2) trace[at] = value

// What a block keeps in shared memory beside the weights, the cache and the schedule's own.
struct __align__(128) Working {
    int x[(CLUSTER ? HIDDEN : FFN) / 4];           // codes of the row that is multiplied; of a cluster's part of a longer one
    float fresh[16][FRESH_PITCH];                  // q, k, v: [d % 64 / 4][head of the group, k, v][d / 64 * 4 + d % 4]
    float weights[GROUP][2][16];                   // of positions, [p % 2][p / 2]
    float2 tops[GROUP][4];                         // greatest score and total weight of 8 positions
    int sums[GATE_TILES > 10 ? GATE_TILES : 10][16];  // of products; zeros between two products
    int code_sums[WARPS];                          // of the codes in x
    float unit[7];                                 // scales of q, k, v, o, gate, up, down
    float scale, factor;                           // of a row whose greatest magnitude came from other blocks
    int failed;                                    // the place of a wait that did not end
};

__device__ __forceinline__ float4 as_floats(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ __forceinline__ float4 load_vector(const float *p) { return as_floats(load(p)); }
__device__ __forceinline__ float2 load_pair(const float *p) {
    uint4 v = load<8>(p);
    return make_float2(__uint_as_float(v.x), __uint_as_float(v.y));
}

// A counter in memory: whoever has seen it reach a number sees what was written before the arrivals.
__device__ __forceinline__ void counter_add(unsigned *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ unsigned counter_seen(const unsigned *counter) {
    unsigned seen;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    return seen;
}

// Waits briefly for the phase of this parity; whether it has ended.
__device__ __forceinline__ bool barrier_opens(unsigned barrier, int parity) {
    unsigned ended;
    asm volatile("{\n\t.reg .pred done;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\tselp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended;
}

// Adds to four sums in memory; exact, whatever the order, while they are integers below 2^24.
__device__ __forceinline__ void add_vector(float *to, float4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Repeats `ready` until it is true, or gives up.
template <class Ready>
__device__ __forceinline__ void wait_until(Working &own, int place, Ready ready) {
    if (ready()) return;
    long long start = clock64();
    while (!ready()) {
        if (*(volatile int *)&own.failed) return;
        if (clock64() - start > LIMIT) *(volatile int *)&own.failed = place;
    }
}
// For one thread: all `count` arrivals.
__device__ __forceinline__ void wait_for_count(Working &own, int place, const unsigned *counter, unsigned count) {
    wait_until(own, place, [&] { return (int)(counter_seen(counter) - count) >= 0; });
}
// For each thread that reads what is sent: the bytes that a barrier of this block expects.
__device__ __forceinline__ void wait_for_sent(Working &own, int place, Barrier *barrier, int parity) {
    unsigned at = shared_at(barrier);
    wait_until(own, place, [&] { return barrier_opens(at, parity); });
}

__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Adds the sums of codes times x to `sums` [TILES][16], warps sharing the units evenly; a __syncthreads() has to follow.
template <int TILES, int STEPS>
__device__ __forceinline__ void multiply(const uint4 *units, Working &own) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int unit = TILES * STEPS * warp / WARPS, end = TILES * STEPS * (warp + 1) / WARPS;
    int tile = unit / STEPS, step = unit % STEPS, held[2][4][4] = {};
    for (; unit < end; unit++) {
        uint4 low = units[unit * UNIT + lane], high = units[unit * UNIT + WARP + lane], x[4];
#pragma unroll
        for (int plane = 0; plane < 4; plane++) x[plane] = *(const uint4 *)((const char *)own.x + step * STEP + plane * 64 + quarter * 16);
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
            unsigned mask = 0x03030303u << (6 - 2 * plane);
            mma(held[0][plane], low.x & mask, high.x & mask, low.y & mask, high.y & mask, x[plane].x, x[plane].y);
        }
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
            unsigned mask = 0x03030303u << (6 - 2 * plane);
            mma(held[1][plane], low.z & mask, high.z & mask, low.w & mask, high.w & mask, x[plane].z, x[plane].w);
        }
        if (++step < STEPS && unit + 1 < end) continue;
        int sum_low = 0, sum_high = 0;
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
            sum_low += held[0][plane][0] + held[1][plane][0] >> (6 - 2 * plane);
            sum_high += held[0][plane][2] + held[1][plane][2] >> (6 - 2 * plane);
#pragma unroll
            for (int i = 0; i < 4; i++) held[0][plane][i] = held[1][plane][i] = 0;
        }
        if (quarter == 0) atomicAdd(&own.sums[tile][group], sum_low), atomicAdd(&own.sums[tile][group + 8], sum_high);
        tile++, step = 0;
    }
}

// What the sums of codes exceed those of weights by.
__device__ __forceinline__ int code_sum(const Working &own) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += own.code_sums[i];
    return sum;
}

// Takes a sum, less `excess`, and leaves zero.
__device__ __forceinline__ int take(Working &own, int tile, int row, int excess) {
    int sum = own.sums[tile][row];
    own.sums[tile][row] = 0;
    return sum - excess;
}

// RMSNorm and absmax int8 of a row of K floats that the block holds, to `own.x`. Returns the scale; the whole block may read x then.
template <int K>
__device__ __forceinline__ float quantise(Working &own, float4 (&v)[VECTORS_OF(K, THREADS)], const float4 (&gain)[VECTORS_OF(K, THREADS)]) {
    int sum = 0;
    float scale = norm_quant_row<WARPS, true>(v, gain, K, EPS, [&](unsigned k, int word) {
        if (k < K / 4) own.x[k] = word;
        sum = dot_ones(word, sum);
    });
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) own.code_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    return scale;
}

__device__ __forceinline__ float quantise_residual(Working &own, const float4 (&x)[VECTORS_X], const float4 (&gain)[VECTORS_X]) {
    float4 v[VECTORS_X];
#pragma unroll
    for (int i = 0; i < VECTORS_X; i++) v[i] = x[i];
    return quantise<HIDDEN>(own, v, gain);
}

template <int N>
__device__ __forceinline__ void load_gains(float4 (&gain)[N], const float *from, int dim) {
#pragma unroll
    for (int i = 0; i < N; i++) gain[i] = vector_or_zero(from, threadIdx.x + i * THREADS, dim);
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ void store_residual(float *to, const float4 (&x)[VECTORS_X]) {
#pragma unroll
    for (int i = 0; i < VECTORS_X; i++) {
        if (threadIdx.x + i * THREADS < HIDDEN / 4) ((float4 *)to)[threadIdx.x + i * THREADS] = x[i];
    }
}
__device__ __forceinline__ void trace_residual(float *to, const float4 (&x)[VECTORS_X]) {
    if (WATCH == 2 && blockIdx.x == 0) store_residual(to, x);
}
// The codes in x, which are row `row` of the layer's four from column `from` on; and the row's scale.
__device__ __forceinline__ void trace_codes(const Working &own, float *trace, int row, int from, int bytes, float scale, int block) {
    if (WATCH != 2 || blockIdx.x != block) return;
    for (int i = threadIdx.x; i < bytes / 4; i += THREADS) ((int *)trace)[TRACE_CODES + (row * HIDDEN + from) / 4 + i] = own.x[i];
    TRACE(TRACE_SCALES + row, scale);
}

// Copies this block's weights and cache to shared memory, and clears the rest.
__device__ __forceinline__ void begin_block(Working &own, uint4 *resident, const uint4 *image, int vectors, const float *units) {
    for (int i = threadIdx.x; i < vectors; i += THREADS) resident[i] = image[i];
    for (int i = threadIdx.x; i < sizeof(Working) / 4; i += THREADS) ((int *)&own)[i] = 0;
    __syncthreads();
    if (threadIdx.x < 7) own.unit[threadIdx.x] = units[threadIdx.x];
    __syncthreads();
}

// Stores the residual, and a bit for the place of a wait that was given up.
__device__ __forceinline__ void end_block(const Working &own, unsigned *counters, float *out, const float4 (&x)[VECTORS_X]) {
    if (blockIdx.x == 0) store_residual(out, x);
    if (threadIdx.x == 0 && own.failed) atomicOr(COUNTER(FAILURE), 1u << own.failed);
}

// Stores the new k and v, in `fresh`, in row `row` of this block's part of the cache.
__device__ __forceinline__ void append(const Working &own, f16 *keys, f16 *values, int row) {
    int which = threadIdx.x / DIM, d = threadIdx.x % DIM;
    if (which < 2) put((which ? values + row * V_PITCH : keys + row * K_PITCH) + d, own.fresh[d % 64 / 4][(4 + which) * 8 + d / 64 * 4 + d % 4]);
    __syncthreads();
}

__device__ __forceinline__ float2 two(unsigned word) {
    return make_float2(to_float(f16{(unsigned short)word}), to_float(f16{(unsigned short)(word >> 16)}));
}

// What attention gives over some positions: two dimensions' sums, and their head's greatest score and total weight.
struct Attended {
    float2 sum, top;
};

// Attention of the four heads in `fresh` over `count` of SPAN (at most 32) positions. Warp w's lanes 0 to 15 (and 16 to 31 as well) get head
// w / 4, dimensions 32 (w % 4) + 2 lane and the next.
template <int SPAN>
__device__ __forceinline__ Attended attend(Working &own, const f16 *keys, const f16 *values, int count) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int head = warp % 4, eight = warp / 4, position = eight * 8 + lane / 4, part = lane % 4;
    float score = 0.0f;
#pragma unroll
    for (int c = 0; c < DIM / 16; c++) {
        int four = c * 4 + part;
        float4 q = *(const float4 *)&own.fresh[four % 16][head * 8 + four / 16 * 4];
        uint2 k = *(const uint2 *)(keys + min(position, SPAN - 1) * K_PITCH + four * 4);
        float2 low = two(k.x), high = two(k.y);
        score += q.x * low.x + q.y * low.y + q.z * high.x + q.w * high.y;
    }
    score += __shfl_xor_sync(FULL, score, 1), score += __shfl_xor_sync(FULL, score, 2);
    score = position < count ? score * (LOG2_E * rsqrtf(DIM)) : LOWEST;
    float top = over_groups<Max>(score), weight = power(score - top), total = over_groups<Sum>(weight);
    if (part == 0) own.weights[head][position % 2][position / 2] = weight;
    if (lane == 0) own.tops[head][eight] = make_float2(top, total);
    __syncthreads();

    int pair = warp % 4 * 16 + lane % 16, half = lane / 16;
    head = warp / 4;
    Attended all = {make_float2(0.0f, 0.0f), make_float2(LOWEST, 0.0f)};
#pragma unroll
    for (int g = 0; g < 4; g++) all.top.x = fmaxf(all.top.x, own.tops[head][g].x);
#pragma unroll
    for (int g = 0; g < 4; g++) {
        float4 w = *(const float4 *)&own.weights[head][half][g * 4];
        const float each[4] = {w.x, w.y, w.z, w.w};
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float2 v = two(*(const unsigned *)(values + min(2 * (g * 4 + j) + half, SPAN - 1) * V_PITCH + pair * 2));
            sum.x += each[j] * v.x, sum.y += each[j] * v.y;
        }
        float factor = power(own.tops[head][g].x - all.top.x);
        all.sum.x += sum.x * factor, all.sum.y += sum.y * factor, all.top.y += own.tops[head][g].y * factor;
    }
    all.sum.x += __shfl_xor_sync(FULL, all.sum.x, 16), all.sum.y += __shfl_xor_sync(FULL, all.sum.y, 16);
    return all;
}
