// A layer of 2B4T's shape in five phases, and between them vectors in memory and a counter that all blocks wait for: one block a
// multiprocessor, each of which computes whole rows. The blocks of a key/value head wait for each other, too, before each merges a share of
// the head's attention. See bench_chain.cuh.

// Blocks of a key/value head, and the positions of each.
#define SHARES (BLOCKS / KV_HEADS)
#define SPAN ((CONTEXT + SHARES - 1) / SHARES)
#define MERGED ((SUMS + SHARES - 1) / SHARES) /* values that a block merges */
#define QKV_TILES TILES_OF(QKV, BLOCKS)
#define ROW_TILES TILES_OF(HIDDEN, BLOCKS) /* of o, and of down */
#define FFN_STEPS (FFN / STEP)
#define HIDDEN_STEPS (HIDDEN / STEP)
#define O_AT (QKV_TILES * HIDDEN_STEPS) /* units before those of o, and so on */
#define GATE_AT (O_AT + ROW_TILES * HIDDEN_STEPS)
#define DOWN_AT (GATE_AT + GATE_TILES * HIDDEN_STEPS)
#define UNITS (DOWN_AT + ROW_TILES * FFN_STEPS)
#define KEYS_AT (UNITS * UNIT)
#define VALUES_AT (KEYS_AT + SPAN * K_PITCH * 2 / 16)
#define RESIDENT (VALUES_AT + SPAN * V_PITCH * 2 / 16)

// Vectors in memory.
#define OUT_QKV 0
#define OUT_PARTS (OUT_QKV + QKV)                          // [KV_HEADS][SHARES][SUMS]
#define OUT_TOPS (OUT_PARTS + KV_HEADS * SHARES * SUMS)    // [KV_HEADS][SHARES][GROUP][2]
#define OUT_ATTENDED (OUT_TOPS + KV_HEADS * SHARES * GROUP * 2)
#define OUT_O (OUT_ATTENDED + HIDDEN)
#define OUT_GATED (OUT_O + HIDDEN)
#define OUT_DOWN (OUT_GATED + FFN)

static_assert(RESIDENT * 16 + sizeof(Working) <= MAX_SHARED, "a layer does not fit");
static_assert(SHARES <= WARP && SPAN <= WARP && ROW_TILES * 16 <= THREADS, "a lane merges a share, and a warp attends to 8 positions");

template <int N>
__device__ __forceinline__ void load_row(float4 (&v)[N], const float *from, int dim) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        int k = threadIdx.x + i * THREADS;
        v[i] = k < dim / 4 ? load_vector(from + 4 * k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
chain(const uint4 *images, const float *first, const float *gains, const float *angles, const float *units, float *memory, unsigned *counters,
      int layers, float *out, void *watched) {
    extern __shared__ __align__(128) uint4 resident[];
    Working &own = *(Working *)(resident + RESIDENT);
    int t = threadIdx.x, warp = t / WARP, lane = t % WARP, block = blockIdx.x;
    begin_block(own, resident, images + (size_t)block * RESIDENT, RESIDENT, units);
    f16 *keys = (f16 *)(resident + KEYS_AT), *values = (f16 *)(resident + VALUES_AT);
    int kv = block / SHARES, share = block % SHARES, position = share * SPAN;  // kv of KV_HEADS: no attention
    float cosine = angles[t % PAIRS], sine = angles[PAIRS + t % PAIRS];
    float4 x[VECTORS_X], gain[VECTORS_X], wide[VECTORS_OF(FFN, THREADS)], wide_gain[VECTORS_OF(FFN, THREADS)];
    load_gains(x, first, HIDDEN);
    load_gains(gain, gains + GAIN_ATTENTION, HIDDEN);
    long long *stamps = (long long *)watched + (size_t)block * layers * STAMPS;
    float *trace = (float *)watched;
    unsigned arrived = 0;

    auto arrive = [&](unsigned *counter) {
        __syncthreads();
        if (t == 0) counter_add(counter);
    };
    auto meet = [&](int place) {
        arrived += BLOCKS;
        if (t == 0) wait_for_count(own, place, COUNTER(0), arrived);
        __syncthreads();
    };
    // Adds a vector to the residual, norms it, and leaves its codes and sums for products.
    auto next_row = [&](int from) {
        float4 v[VECTORS_X];
        load_row(v, memory + from, HIDDEN);
#pragma unroll
        for (int i = 0; i < VECTORS_X; i++) x[i] = plus(x[i], v[i]);
    };
    // Stores this block's results of o or down.
    auto store_rows = [&](int to, float scale, int which) {
        if (t >= ROW_TILES * 16) return;
        int row = (block + t / 16 * BLOCKS) * 16 + t % 16, sum = take(own, t / 16, t % 16, code_sum(own));
        if (row < HIDDEN) memory[to + row] = dequantize(sum, scale, own.unit[which]);
    };

    for (int layer = 0; layer < layers; layer++) {
        STAMP(0);
        trace_residual(trace + TRACE_X, x);
        float scale = quantise_residual(own, x, gain);
        trace_codes(own, trace, 0, 0, HIDDEN, scale, 0);
        STAMP(1);
        multiply<QKV_TILES, HIDDEN_STEPS>(resident, own);
        __syncthreads();
        if (t < QKV_TILES * 16) {
            int row = (block + t / 16 * BLOCKS) * 16 + t % 16, sum = take(own, t / 16, t % 16, code_sum(own));
            int which = (row >= HIDDEN) + (row >= HIDDEN + KV_HEADS * DIM);
            if (row < QKV) memory[OUT_QKV + row] = dequantize(sum, scale, own.unit[which]);
        }
        arrive(COUNTER(0));
        STAMP(2);
        meet(1);
        STAMP(3);
        if (kv < KV_HEADS) {
            bool last = position <= CONTEXT - 1 && CONTEXT - 1 < position + SPAN;
            int d = t % PAIRS, slot = t / PAIRS;  // heads of the group, k, v: 6 slots of 8
            if (slot < (last ? 6 : GROUP)) {
                int head = slot < GROUP ? kv * GROUP + slot : HEADS + (slot - GROUP) * KV_HEADS + kv;
                const float *row = memory + OUT_QKV + head * DIM;
                float a = load_scale(row + d), b = load_scale(row + d + PAIRS);
                bool turns = slot <= GROUP;
                float low = turns ? a * cosine - b * sine : a, high = turns ? b * cosine + a * sine : b;
                own.fresh[d / 4][slot * 8 + d % 4] = low, own.fresh[d / 4][slot * 8 + 4 + d % 4] = high;
                TRACE(TRACE_QKV + head * DIM + d, low);
                TRACE(TRACE_QKV + head * DIM + d + PAIRS, high);
            }
            __syncthreads();
            if (last) append(own, keys, values, CONTEXT - 1 - position);
            Attended part = attend<SPAN>(own, keys, values, min(SPAN, CONTEXT - position));
            float *to = memory + OUT_PARTS + (kv * SHARES + share) * SUMS + warp * 32, *top = memory + OUT_TOPS + ((kv * SHARES + share) * GROUP + warp / 4) * 2;
            if (lane < 16) *(float2 *)(to + 2 * lane) = part.sum;
            if (warp % 4 == 0 && lane == 0) *(float2 *)top = part.top;
            arrive(COUNTER(1 + kv));
            STAMP(4);
            if (t == 0) wait_for_count(own, 2, COUNTER(1 + kv), SHARES * (layer + 1));
            __syncthreads();
            STAMP(5);
#pragma unroll
            for (int turn = 0; turn < (MERGED + WARPS - 1) / WARPS; turn++) {  // a warp merges a value, a lane has a part of it
                int k = warp + turn * WARPS, i = share * MERGED + k;
                if (k >= MERGED || i >= SUMS) break;
                float sum = 0.0f;
                float2 of = make_float2(LOWEST, 0.0f);
                if (lane < SHARES) {
                    sum = load_scale(memory + OUT_PARTS + (kv * SHARES + lane) * SUMS + i);
                    of = load_pair(memory + OUT_TOPS + ((kv * SHARES + lane) * GROUP + i / DIM) * 2);
                }
                float factor = power(of.x - warp_reduce<Max>(of.x));
                float whole = warp_reduce<Sum>(of.y * factor), value = warp_reduce<Sum>(sum * factor) * reciprocal(whole);
                if (lane == 0) memory[OUT_ATTENDED + kv * SUMS + i] = value;
                if (lane == 0) TRACE(TRACE_ATTENDED + kv * SUMS + i, value);
            }
        }
        load_gains(gain, gains + GAIN_O, HIDDEN);
        arrive(COUNTER(0));
        STAMP(6);
        meet(3);
        STAMP(7);
        {
            float4 v[VECTORS_X];
            load_row(v, memory + OUT_ATTENDED, HIDDEN);
            scale = quantise<HIDDEN>(own, v, gain);
        }
        trace_codes(own, trace, 1, 0, HIDDEN, scale, 0);
        STAMP(8);
        multiply<ROW_TILES, HIDDEN_STEPS>(resident + O_AT * UNIT, own);
        __syncthreads();
        store_rows(OUT_O, scale, 3);
        load_gains(gain, gains + GAIN_FFN, HIDDEN);
        arrive(COUNTER(0));
        STAMP(9);
        meet(4);
        STAMP(10);
        next_row(OUT_O);
        trace_residual(trace + TRACE_MIDDLE, x);
        scale = quantise_residual(own, x, gain);
        trace_codes(own, trace, 2, 0, HIDDEN, scale, 0);
        STAMP(11);
        multiply<GATE_TILES, HIDDEN_STEPS>(resident + GATE_AT * UNIT, own);
        __syncthreads();
        if (t < GATE_TILES * 8) {
            int row = (block + t / 8 * BLOCKS) * 8 + t % 8, excess = code_sum(own);
            float g = dequantize(take(own, t / 8, t % 8, excess), scale, own.unit[4]);
            float u = dequantize(take(own, t / 8, 8 + t % 8, excess), scale, own.unit[5]);
            if (row < FFN) {
                memory[OUT_GATED + row] = act(g) * u;
                TRACE(TRACE_GATED + row, act(g) * u);
            }
        }
        load_gains(wide_gain, gains + GAIN_DOWN, FFN);
        arrive(COUNTER(0));
        STAMP(12);
        meet(5);
        STAMP(13);
        load_row(wide, memory + OUT_GATED, FFN);
        scale = quantise<FFN>(own, wide, wide_gain);
        trace_codes(own, trace, 3, 0, FFN, scale, 0);
        STAMP(14);
        multiply<ROW_TILES, FFN_STEPS>(resident + DOWN_AT * UNIT, own);
        __syncthreads();
        store_rows(OUT_DOWN, scale, 6);
        load_gains(gain, gains + GAIN_ATTENTION, HIDDEN);
        arrive(COUNTER(0));
        STAMP(15);
        meet(6);
        STAMP(16);
        next_row(OUT_DOWN);
        stamps += STAMPS, trace += TRACE_WORDS;
        if (own.failed) break;
    }
    end_block(own, counters, out, x);
}
