// A layer of 2B4T's shape in clusters of 16 blocks. A cluster has a key/value head's q, k, v and attention. o and down are split by K over
// clusters, whose sums are added in memory. Only those and scalars pass from cluster to cluster, the rest through shared memory. See
// bench_chain.cuh.

#define SPAN (CONTEXT / CLUSTER)
#define QKV_TILES 3                          // 8 rows of each of 4 heads of q, k and v
#define ROWS (16 * QKV_TILES)
#define ROW_TILES (HIDDEN / 16 / CLUSTER)    // of o, and of down
#define O_STEPS (SUMS / STEP)
#define GATED (8 * GATE_TILES)               // gated values of a block
#define DOWN_STEPS ((GATED * CLUSTER + STEP - 1) / STEP)
#define HIDDEN_STEPS (HIDDEN / STEP)
#define O_AT (QKV_TILES * HIDDEN_STEPS)
#define GATE_AT (O_AT + ROW_TILES * O_STEPS)
#define DOWN_AT (GATE_AT + GATE_TILES * HIDDEN_STEPS)
#define UNITS (DOWN_AT + ROW_TILES * DOWN_STEPS)
#define KEYS_AT (UNITS * UNIT)
#define VALUES_AT (KEYS_AT + SPAN * K_PITCH * 2 / 16)
#define RESIDENT (VALUES_AT + SPAN * V_PITCH * 2 / 16)

// What other blocks of the cluster send, each counted by a barrier.
struct __align__(128) Received {
    float sums[CLUSTER][SHARE];      // of attention, by their sender
    float2 tops[CLUSTER];
    float attended[SUMS];            // merged, times its gain
    float gated[CLUSTER * GATED];    // times its gain
    float staged[GATED > ROWS ? GATED : ROWS];  // on its way to others
    float squares[GATED];
    Barrier fresh, parts, merged, all_gated;
};

static_assert(RESIDENT * 16 + sizeof(Working) + sizeof(Received) <= MAX_SHARED, "a layer does not fit");
static_assert(DOWN_STEPS * STEP <= HIDDEN, "the cluster's part of a gated row does not fit in x");

// In memory: sums of o and of down, and of each block the greatest magnitude and the sum of squares of a row's part.
#define OUT_O 0
#define OUT_DOWN HIDDEN
#define OUT_SCALARS (2 * HIDDEN)

extern "C" __global__ void __launch_bounds__(THREADS, 1)
chain(const uint4 *images, const float *first, const float *gains, const float *angles, const float *units, float *memory, unsigned *counters,
      int layers, float *out, void *watched) {
    extern __shared__ __align__(128) uint4 resident[];
    Working &own = *(Working *)(resident + RESIDENT);
    Received &here = *(Received *)(&own + 1);
    int t = threadIdx.x, warp = t / WARP, lane = t % WARP, block = blockIdx.x, rank = block % CLUSTER, cluster = block / CLUSTER;
    begin_block(own, resident, images + (size_t)block * RESIDENT, RESIDENT, units);
    if (t == 0) {
        barrier_init(&here.fresh, 1), barrier_init(&here.parts, 1), barrier_init(&here.merged, 1), barrier_init(&here.all_gated, 1);
        barriers_ready();
    }
    cluster_arrive(), cluster_wait();
    f16 *keys = (f16 *)(resident + KEYS_AT), *values = (f16 *)(resident + VALUES_AT);
    bool attends = cluster < KV_HEADS;
    float cosine = angles[4 * rank + t % 4], sine = angles[PAIRS + 4 * rank + t % 4];
    float merged_gain = attends && t < SHARE ? gains[GAIN_O + cluster * SUMS + rank * SHARE + t] : 0.0f;
    int column = block * GATED + t;  // of the gated value that thread t computes
    float gated_gain = t < GATED && column < FFN ? gains[GAIN_DOWN + column] : 0.0f;
    float4 x[VECTORS_X], gain[VECTORS_X];
    load_gains(x, first, HIDDEN);
    load_gains(gain, gains + GAIN_ATTENTION, HIDDEN);
    long long *stamps = (long long *)watched + (size_t)block * layers * STAMPS;
    float *trace = (float *)watched;
    unsigned arrived = 0;

    // Thread 0 arrives for what it has written, or for the block after a __syncthreads().
    auto arrive = [&] {
        if (t == 0) counter_add(COUNTER(0));
    };
    auto meet = [&](int place) {
        arrived += BLOCKS;
        if (t == 0) wait_for_count(own, place, COUNTER(0), arrived);
    };
    // Warp 0 publishes the greatest magnitude and the sum of squares of its lanes.
    auto publish = [&](float largest, float squared) {
        largest = warp_max(largest), squared = warp_reduce<Sum>(squared);
        if (lane == 0) *(float2 *)(memory + OUT_SCALARS + 2 * block) = make_float2(largest, squared);
    };
    // Waits for what `count` blocks have published: the scale and the factor of a row of `dim`.
    auto meet_scalars = [&](int place, int count, int dim) {
        meet(place);
        if (warp == 0) {
            __syncwarp();
            float largest = 0.0f, sum = 0.0f;
#pragma unroll
            for (int i = 0; i < (BLOCKS + WARP - 1) / WARP; i++) {
                if (lane + i * WARP >= count) continue;
                float2 of = load_pair(memory + OUT_SCALARS + 2 * (lane + i * WARP));
                largest = fmaxf(largest, of.x), sum += of.y;
            }
            largest = warp_max(largest), sum = warp_reduce<Sum>(sum);
            float inverse = rsqrtf(sum * (1.0f / dim) + EPS);
            largest = fmaxf(largest * inverse, QUANT_FLOOR);
            if (lane == 0) own.scale = largest * (1.0f / 127.0f), own.factor = 127.0f * reciprocal(largest) * inverse;
        }
        __syncthreads();
    };
    // Codes of the first `count` values in shared memory, zeros up to `padded`.
    auto quantise_parts = [&](const float *from, int count, int padded) {
        int sum = 0;
        for (int i = t; i < padded / 4; i += THREADS) {
            float4 v = i < count / 4 ? times(((const float4 *)from)[i], own.factor) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            int word = pack(v.x, v.y, v.z, v.w);
            own.x[i] = word, sum = dot_ones(word, sum);
        }
        sum = warp_sum(sum);
        if (lane == 0) own.code_sums[warp] = sum;
        __syncthreads();
    };
    auto send_vectors = [&](float *to, int vectors, Barrier *barrier) {  // of `staged`, to all blocks of the cluster
        for (int i = t; i < CLUSTER * vectors; i += THREADS) {
            int k = i % vectors, other = i / vectors;
            send(in_block(to + 4 * k, other), in_block(barrier, other), ((const float4 *)here.staged)[k]);
        }
    };
    // Adds this block's sums of o or down to everybody's.
    auto add_rows = [&](int to) {
        __syncthreads();
        if (t < ROW_TILES * 4) {
            int excess = code_sum(own), tile = t / 4, row = t % 4 * 4;
            float a = take(own, tile, row, excess), b = take(own, tile, row + 1, excess);
            float c = take(own, tile, row + 2, excess), d = take(own, tile, row + 3, excess);
            add_vector(memory + to + rank * ROW_TILES * 16 + t * 4, make_float4(a, b, c, d));
        }
    };
    auto clear_rows = [&](int at) {
        const int each = (HIDDEN + BLOCKS - 1) / BLOCKS;
        if (t < each && block * each + t < HIDDEN) memory[at + block * each + t] = 0.0f;
    };
    auto next_row = [&](int from, int which) {
#pragma unroll
        for (int i = 0; i < VECTORS_X; i++) {
            int k = t + i * THREADS;
            if (k >= HIDDEN / 4) break;
            float4 v = load_vector(memory + from + 4 * k);
            x[i] = plus(x[i], make_float4(dequantize(v.x, own.scale, own.unit[which]), dequantize(v.y, own.scale, own.unit[which]),
                                          dequantize(v.z, own.scale, own.unit[which]), dequantize(v.w, own.scale, own.unit[which])));
        }
    };

    for (int layer = 0; layer < layers; layer++) {
        int parity = layer % 2;
        STAMP(0);
        if (t == 0) {
            if (attends) {
                barrier_expect(&here.fresh, CLUSTER * ROWS * 4);
                barrier_expect(&here.parts, sizeof here.sums + sizeof here.tops);
                barrier_expect(&here.merged, sizeof here.attended);
            }
            barrier_expect(&here.all_gated, sizeof here.gated);
        }
        trace_residual(trace + TRACE_X, x);
        float scale = quantise_residual(own, x, gain);
        trace_codes(own, trace, 0, 0, HIDDEN, scale, 0);
        STAMP(1);
        load_gains(gain, gains + GAIN_FFN, HIDDEN);
        if (attends) {
            multiply<QKV_TILES, HIDDEN_STEPS>(resident, own);
            __syncthreads();
            if (warp < 2) {  // thread t has row t: of slot t / 8, dimension 4 rank + t % 4, or 64 more
                int row = min(t, ROWS - 1), slot = row / 8, sum = own.sums[row / 16][row % 16] - code_sum(own);
                float value = dequantize(sum, scale, own.unit[slot < GROUP ? 0 : slot - GROUP + 1]);
                float other = __shfl_xor_sync(FULL, value, 4);
                if (slot <= GROUP) value = t % 8 < 4 ? value * cosine - other * sine : value * cosine + other * sine;
                if (t < ROWS) {
                    own.sums[row / 16][row % 16] = 0, here.staged[t] = value;
                    int head = slot < GROUP ? cluster * GROUP + slot : HEADS + (slot - GROUP) * KV_HEADS + cluster;
                    TRACE(TRACE_QKV + head * DIM + 4 * rank + t % 4 + t % 8 / 4 * PAIRS, value);
                }
            }
            __syncthreads();
            send_vectors(own.fresh[rank], ROWS / 4, &here.fresh);
            STAMP(2);
            wait_for_sent(own, 1, &here.fresh, parity);
            STAMP(3);
            if (rank == CLUSTER - 1) append(own, keys, values, SPAN - 1);
            Attended part = attend<SPAN>(own, keys, values, SPAN);
            if (lane < 16) {  // warp w has what block w merges
                unsigned barrier = in_block(&here.parts, warp);
                send(in_block(&here.sums[rank][2 * lane], warp), barrier, part.sum);
                if (lane == 0) send(in_block(&here.tops[rank], warp), barrier, part.top);
            }
            STAMP(4);
            wait_for_sent(own, 2, &here.parts, parity);
            STAMP(5);
            int from = lane % 16, i = 2 * warp + lane / 16;
            float2 of = here.tops[from];
            float top = of.x, sum = here.sums[from][i];
            for (int d = 1; d < 16; d *= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, d));
            float factor = power(of.x - top), whole = of.y * factor;
            sum *= factor;
            for (int d = 1; d < 16; d *= 2) sum += __shfl_xor_sync(FULL, sum, d), whole += __shfl_xor_sync(FULL, whole, d);
            if (from == 0) here.staged[i] = sum * reciprocal(whole);
            __syncthreads();
            if (warp == 0) {
                float value = here.staged[t], gained = value * merged_gain;
                TRACE(TRACE_ATTENDED + cluster * SUMS + rank * SHARE + t, value);
                publish(fabsf(gained), value * value);
                here.staged[t] = gained;
            }
        }
        arrive();
        if (attends) {
            __syncthreads();
            send_vectors(here.attended + rank * SHARE, SHARE / 4, &here.merged);
        }
        STAMP(6);
        meet_scalars(3, KV_HEADS * CLUSTER, HIDDEN);
        STAMP(7);
        if (attends) {
            wait_for_sent(own, 4, &here.merged, parity);
            quantise_parts(here.attended, SUMS, SUMS);
            trace_codes(own, trace, 1, cluster * SUMS, SUMS, own.scale, cluster * CLUSTER);
            STAMP(8);
            multiply<ROW_TILES, O_STEPS>(resident + O_AT * UNIT, own);
            add_rows(OUT_O);
        }
        clear_rows(OUT_DOWN);  // which all have read, and nobody adds to yet
        __syncthreads();
        arrive();
        STAMP(9);
        meet(5);
        __syncthreads();
        STAMP(10);
        next_row(OUT_O, 3);
        trace_residual(trace + TRACE_MIDDLE, x);
        scale = quantise_residual(own, x, gain);
        trace_codes(own, trace, 2, 0, HIDDEN, scale, 0);
        STAMP(11);
        load_gains(gain, gains + GAIN_ATTENTION, HIDDEN);
        multiply<GATE_TILES, HIDDEN_STEPS>(resident + GATE_AT * UNIT, own);
        __syncthreads();
        if (t < GATED) {
            int excess = code_sum(own);
            float g = dequantize(take(own, t / 8, t % 8, excess), scale, own.unit[4]);
            float u = dequantize(take(own, t / 8, 8 + t % 8, excess), scale, own.unit[5]);
            float value = act(g) * u;
            here.staged[t] = value * gated_gain, here.squares[t] = value * value;
            if (column < FFN) TRACE(TRACE_GATED + column, value);
        }
        __syncthreads();
        if (warp == 0) {
            float largest = 0.0f, squared = 0.0f;
            for (int i = lane; i < GATED; i += WARP) largest = fmaxf(largest, fabsf(here.staged[i])), squared += here.squares[i];
            publish(largest, squared);
        }
        arrive();
        send_vectors(here.gated + rank * GATED, GATED / 4, &here.all_gated);
        STAMP(12);
        meet_scalars(6, BLOCKS, FFN);
        STAMP(13);
        wait_for_sent(own, 7, &here.all_gated, parity);
        quantise_parts(here.gated, CLUSTER * GATED, DOWN_STEPS * STEP);
        const int width = CLUSTER * GATED, before = cluster * width;
        trace_codes(own, trace, 3, before, min(width, FFN - before), own.scale, cluster * CLUSTER);
        STAMP(14);
        multiply<ROW_TILES, DOWN_STEPS>(resident + DOWN_AT * UNIT, own);
        add_rows(OUT_DOWN);
        clear_rows(OUT_O);
        __syncthreads();
        arrive();
        STAMP(15);
        meet(8);
        __syncthreads();
        STAMP(16);
        next_row(OUT_DOWN, 6);
        stamps += STAMPS, trace += TRACE_WORDS;
        if (own.failed) break;
    }
    cluster_arrive(), cluster_wait();  // no block's shared memory ends while others may send to it
    end_block(own, counters, out, x);
}
