// Quantisations with a Hadamard transform, whole: norm_quant, glu_norm_quant (KIND 1) and gated_quant (KIND 2), the last also without a
// transform (BLOCK 0). A block of threads has CHUNKS times 1,024 elements of a row in registers; a row is that of one block, or of the
// CLUSTER blocks of a cluster. `other` is the gate of gated_quant. `sums` as in norm_quant, where SUMS.
//
// An element's lowest two bits are its place in a vector, the next five its lane, the next three its warp. Blocks of a transform lie
// within 1,024 elements; its steps over bits of the warp are products with all vectors that differ in them, from shared memory.
//
// PLANES: of a single row, the codes' bits too, as ternary_bits counts them: of each group of 128 columns, a lane's word has bit lane / 4
// of the codes of the 16 columns of lane % 4 in each half of 16. Of a code's columns the first has its byte's highest two bits.
//
// ORDERED: of up to 8 rows, the codes also in the order of ternary_few.
//
// GATES: more blocks, behind those of TOKENS rows, have delta_gates of the same rows and norm: a block a head of GATES tokens.
#if KIND == 2
#include "gate.cuh"
#endif
#if GATES
#include "gates.cuh"
#define GATES_ARGS , const float *alpha, const float *beta, const float *bias, const float *rate, float *gates, int heads
#else
#define GATES_ARGS
#endif
#if PLANES
#define PLANES_ARGS , unsigned *planes
#elif ORDERED
#define PLANES_ARGS , int *ordered
#else
#define PLANES_ARGS
#endif
#define CHUNK (4 * WG)
#define CHUNKS ((DIM + CHUNK * CLUSTER - 1) / (CHUNK * CLUSTER))
#define CHUNKS_OF_ROW ((DIM + CHUNK - 1) / CHUNK)
#define AHEAD 6 /* as many have their signs and gains fetched before the row is there: more need too many registers */
#define WARPS (WG / WARP)
#define LANES (BLOCK >= 4 * WARP ? WARP : BLOCK / 4)  /* that a transform spans */
#define SPAN (BLOCK / (4 * WARP))                     /* warps that it spans */
#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float4 minus(float4 a, float4 b) { return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w); }
__device__ __forceinline__ float step_of(float mine, int apart) {
    float other = __shfl_xor_sync(FULL, mine, apart);
    return threadIdx.x & apart ? other - mine : mine + other;
}

// The transform of a vector, by all threads of the block: `tile` is free again once all have passed the next barrier.
__device__ __forceinline__ float4 transformed(float4 v, float4 (&tile)[WG]) {
    v = make_float4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
    v = make_float4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
#pragma unroll
    for (int apart = 1; apart < LANES; apart *= 2) {
        v = make_float4(step_of(v.x, apart), step_of(v.y, apart), step_of(v.z, apart), step_of(v.w, apart));
    }
#if BLOCK > 4 * WARP
    tile[threadIdx.x] = v;
    __syncthreads();
    int warp = threadIdx.x / WARP, first = warp / SPAN * SPAN;
    float4 all[SPAN];
#pragma unroll
    for (int w = 0; w < SPAN; w++) all[w] = tile[(first + w) * WARP + threadIdx.x % WARP];
#pragma unroll
    for (int half = SPAN / 2; half > 0; half /= 2) {  // the highest bit first: half of the sums are this warp's
#pragma unroll
        for (int w = 0; w < half; w++) all[w] = warp & half ? minus(all[w], all[w + half]) : plus(all[w], all[w + half]);
    }
    v = all[0];
#endif
    return v;
}

#if PLANES
// This lane's word of a group's bits, of the codes of whose columns each lane has four.
__device__ __forceinline__ unsigned planes_of(int word) {
    int lane = threadIdx.x % WARP, up = 6 - lane / 8 * 2 + lane / 4 % 2;
    unsigned all[8];
#pragma unroll
    for (int bit = 0; bit < 8; bit++) all[bit] = ((unsigned)word >> bit & 0x01010101u) << up;
#pragma unroll
    for (int half = 4, apart = 16; half > 0; half /= 2, apart /= 2) {  // each exchange leaves half of the words to each lane
        bool high = lane & apart;
#pragma unroll
        for (int i = 0; i < half; i++) {
            unsigned mine = high ? all[i + half] : all[i], other = high ? all[i] : all[i + half];
            all[i] = mine | __shfl_xor_sync(FULL, other, apart);
        }
    }
    return all[0];
}
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(WG)
transform_quant(const int *step, const float *x, const float *other, const float *weight, const float *signs, float eps,
                signed char *out, float *scale, int *sums PLANES_ARGS GATES_ARGS) {
#if GATES
    if (blockIdx.x >= TOKENS * CLUSTER) {
        int h = (blockIdx.x - TOKENS * CLUSTER) % heads, first = (blockIdx.x - TOKENS * CLUSTER) / heads * GATES;
        float4 gain[CHUNKS_OF_ROW], a[CHUNKS_OF_ROW], b[CHUNKS_OF_ROW];
#pragma unroll
        for (int i = 0; i < CHUNKS_OF_ROW; i++) {
            int at = threadIdx.x + i * WG;
            gain[i] = vector_or_zero(weight, at, DIM);
            a[i] = vector_or_zero(alpha + (size_t)h * DIM, at, DIM), b[i] = vector_or_zero(beta + (size_t)h * DIM, at, DIM);
        }
        start_dependents();
        wait_for_before();
        int tokens = STEP_TOKENS(step) - first;
        if (tokens <= 0) return;
        Gates found[GATES];
#pragma unroll
        for (int i = 0; i < CHUNKS_OF_ROW; i++) {
#pragma unroll
            for (int t = 0; t < GATES; t++) {
                const float *row = x + (size_t)(first + min(t, tokens - 1)) * DIM;
                found[t].add(vector_or_zero(row, threadIdx.x + i * WG, DIM), gain[i], a[i], b[i]);
            }
        }
        finish_gates(found, tokens, h, gates + (size_t)first * 2 * heads, bias, rate, DIM, heads, eps);
        return;
    }
#endif
    __shared__ __align__(16) float4 tiles[2][WG];
    __shared__ float2 parts[WARPS];
#if CLUSTER > 1
    __shared__ __align__(8) float2 shares[CLUSTER];
    __shared__ unsigned long long all_here;
#endif
    int rank = blockIdx.x % CLUSTER, m = blockIdx.x / CLUSTER, warp = threadIdx.x / WARP;
    auto index = [&](int i) { return (rank * CHUNKS + i) * WG + threadIdx.x; };  // of a vector of the row
    start_dependents();
#if CLUSTER > 1
    if (threadIdx.x == 0) init_barrier(&all_here), expect_bytes(&all_here, sizeof(shares));
    cluster_arrive();
#endif
    float4 v[CHUNKS];
#if BLOCK
    const float root = 1.0f / sqrtf((float)BLOCK);
#else
    const float root = 1.0f;
#endif
    auto factors = [&](int i) {
        float4 all = SIGNS ? times(vector_or_zero(signs, index(i), DIM), root) : make_float4(root, root, root, root);
        return NORM && KIND < 2 ? times(all, vector_or_zero(weight, index(i), DIM)) : all;
    };
#if CHUNKS <= AHEAD
    float4 unit[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) unit[i] = factors(i);
#endif
    wait_for_before();
    bool there = m < STEP_TOKENS(step);
    float sum = 0.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if KIND == 0
        if (there) y = vector_or_zero(x + (size_t)m * DIM, index(i), DIM);
#elif KIND == 1
        if (there) {
            float4 g = vector_or_zero(x + (size_t)m * 2 * DIM, index(i), DIM), u = vector_or_zero(x + (size_t)m * 2 * DIM + DIM, index(i), DIM);
            y = make_float4(act(g.x) * u.x, act(g.y) * u.y, act(g.z) * u.z, act(g.w) * u.w);
        }
#else
        int at = index(i) * 4, head = head_at(at / HEAD, DIM / HEAD), from = head * HEAD + at % HEAD;
        float4 g = y;
        if (there && at < DIM) y = *(const float4 *)(x + (size_t)m * DIM + from), g = *(const float4 *)(other + (size_t)m * DIM + from);
#if NORM  // a head has the elements of HEAD / 4 neighbouring lanes
        float ss = squares(y);
#pragma unroll
        for (int apart = HEAD / 8; apart > 0; apart /= 2) ss += __shfl_xor_sync(FULL, ss, apart);
        y = times(times(y, 1.0f / sqrtf(ss * (1.0f / HEAD) + eps)), *(const float4 *)(weight + at % HEAD));
#endif
        y = make_float4(y.x * activated(g.x), y.y * activated(g.y), y.z * activated(g.z), y.w * activated(g.w));
#endif
        if (NORM && KIND < 2) sum += squares(y);
#if CHUNKS <= AHEAD
        y = times(y, unit[i]);
#else
        y = times(y, factors(i));
#endif
#if BLOCK
        y = transformed(y, tiles[i % 2]);
#endif
        v[i] = y;
        largest = fmaxf(largest, magnitude(y));
    }
    if (NORM && KIND < 2) sum = warp_reduce<Sum>(sum);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) parts[warp] = make_float2(sum, largest);
    __syncthreads();
    sum = largest = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += parts[w].x, largest = fmaxf(largest, parts[w].y);
#if CLUSTER > 1
    cluster_wait();  // all blocks expect their bytes
    int to = threadIdx.x;
    if (to < CLUSTER) send(in_block(&shares[rank], to), in_block(&all_here, to), make_float2(sum, largest));
    wait_for_bytes(&all_here);
    sum = largest = 0.0f;
#pragma unroll
    for (int r = 0; r < CLUSTER; r++) sum += shares[r].x, largest = fmaxf(largest, shares[r].y);
#endif
    if (!there) return;
    float inverse = NORM && KIND < 2 ? rsqrtf(sum * (1.0f / DIM) + eps) : 1.0f;
    largest = fmaxf(largest * inverse, QUANT_FLOOR);
    float factor = 127.0f * reciprocal(largest) * inverse;
    int row_sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        float4 scaled = times(v[i], factor);
        int word = pack(scaled.x, scaled.y, scaled.z, scaled.w);
        if (index(i) < DIM / 4) ((int *)(out + (size_t)m * DIM))[index(i)] = word;
#if PLANES
        unsigned mine = planes_of(word);
        if (index(i) < DIM / 4) planes[index(i)] = mine;
#elif ORDERED
        int at = index(i) % 64, block = at / 32, pair = at / 8 % 4, quarter = at / 2 % 4;  // of 256 columns, where four lie side by side
        if (index(i) < DIM / 4) ordered[index(i) / 64 * 512 + ((block * 2 + pair / 2) * WARP + m * 4 + quarter) * 4 + pair % 2 * 2 + at % 2] = word;
#endif
        if (SUMS) row_sum = add_to_row(word, row_sum);
    }
#if SUMS
    finish_row<WARPS>(row_sum, largest * (1.0f / 127.0f), sums + m, scale + m);
#else
    if (rank == 0 && threadIdx.x == 0) scale[m] = largest * (1.0f / 127.0f);
#endif
}
