// Attention of few tokens over long, f16 caches, on the tensor cores: the positions of a sequence are split over blocks (flash
// decoding), and those of a block over its warps, 16 at a time.
//
// Grid: [KV_HEADS, tokens, SPLITS]. Keys are the rows of one product, S = K Qt, and values of the other, O = Vt Pt, so that the
// GROUP query heads of a key/value head are the 8 columns of both. All comes 16 bytes a thread as it lies in the cache: of keys
// in an order of dimensions that q follows, of values with neighbouring positions paired in registers. q is the sum of two halves.
//
// CLUSTER: the splits are a thread block cluster, and merge their parts in its shared memory. Else the block that finishes last
// for a token and key/value head does so through memory.
//
// ROPE: each token is a sequence of its own, and what one writes no other reads; rotates q and k here, and stores k and v in the
// cache (rope_append's work). Then whatever was in the cache before the step may be fetched before this kernel waits for the
// one that computes q, k and v.
//
// DEPTH tiles of a warp are fetched ahead.
#define GROUP (HEADS / KV_HEADS)
#define CHUNKS (DIM / 32)
#define HALVES (DIM / 64)
#define TILE 16
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* less than any score, and finite: the difference of two is no NaN */
#if CLUSTER
#define IN_CLUSTER __cluster_dims__(1, 1, SPLITS)
#else
#define IN_CLUSTER
#endif

// From the second-level cache: another kernel may have written it while this one was waiting.
__device__ __forceinline__ uint4 load(const f16 *p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned halves(float low, float high) {
    unsigned out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ uint4 halves(const float (&v)[8]) {
    return make_uint4(halves(v[0], v[1]), halves(v[2], v[3]), halves(v[4], v[5]), halves(v[6], v[7]));
}

__device__ __forceinline__ float power(float x) {  // of 2
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ unsigned transposed(unsigned m) {
    unsigned out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(m));
    return out;
}

__device__ __forceinline__ void load_floats(float (&v)[8], const float *from) {
    float4 low = ((const float4 *)from)[0], high = ((const float4 *)from)[1];
    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w, v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
}

__device__ __forceinline__ unsigned word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The over-lanes sum or maximum where those of equal `quarter` hold the same head.
template <class Op>
__device__ __forceinline__ float over_groups(float v) {
    for (int i = 4; i < WARP; i *= 2) v = Op::of(v, __shfl_xor_sync(FULL, v, i));
    return v;
}

// A thread's dimensions of a head, 32 c + 8 quarter + 0 ... 7, and the rotation's angles for them.
struct Angles {
    float cosine[CHUNKS * 4], sine[CHUNKS * 4];
};

__device__ __forceinline__ void rotate(float (&v)[CHUNKS][8], const Angles &angles) {
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++) {
        float &a = NEOX ? v[i / 8][i % 8] : v[i / 4][i % 4 * 2];
        float &b = NEOX ? v[i / 8 + CHUNKS / 2][i % 8] : v[i / 4][i % 4 * 2 + 1];
        float old = a;
        a = old * angles.cosine[i] - b * angles.sine[i];
        b = b * angles.cosine[i] + old * angles.sine[i];
    }
}

extern "C" __global__ void IN_CLUSTER __launch_bounds__(WARPS * WARP, WARPS == 4 ? 3 : 1)
attention_decode(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks,
                 const float *qkv, f16 *keys, f16 *values, const float *cosines, const float *sines, float *out, float *parts,
                 unsigned *arrivals) {
    __shared__ float warp_sums[WARPS][GROUP][DIM];
    __shared__ float warp_max[WARPS][8], warp_total[WARPS][8];
    int kv_head = blockIdx.x, m = blockIdx.y, split = blockIdx.z;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int span = ((length + TILE - 1) / TILE + SPLITS - 1) / SPLITS * TILE;
    int begin = split * span, end = min(length, begin + span), stored = ROPE ? min(end, length - 1) : end;

    auto place = [&](int p) {
        return (((size_t)table[p / BLOCK] * BLOCK + p % BLOCK) * KV_HEADS + kv_head) * DIM;
    };
    uint4 keys_of[DEPTH][2][CHUNKS], values_of[DEPTH][4][HALVES];
    auto fetch = [&](int slot, int start) {
        auto &key = keys_of[slot];
        auto &value = values_of[slot];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int p = start + group + 8 * h;
            size_t at = (p < stored ? place(p) : 0) + quarter * 8;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) key[h][c] = p < stored ? load(keys + at + 32 * c) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int p = start + 2 * quarter + i % 2 + i / 2 * 8;
            size_t at = (p < stored ? place(p) : 0) + group * 8;
#pragma unroll
            for (int h = 0; h < HALVES; h++) value[i][h] = p < stored ? load(values + at + 64 * h) : make_uint4(0, 0, 0, 0);
        }
    };
    const float *row = qkv + (size_t)m * (HEADS + 2 * KV_HEADS) * DIM;
    const float *row_q = row + (kv_head * GROUP + min(group, GROUP - 1)) * DIM + quarter * 8;
    auto fetch_first = [&] {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) fetch(slot, begin + (warp + slot * WARPS) * TILE);
    };
#if ROPE
    fetch_first();
    Angles angles;
#pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++) {
        int pair = NEOX ? i / 8 * 32 + quarter * 8 + i % 8 : i / 4 * 16 + quarter * 4 + i % 4;
        angles.cosine[i] = cosines[(size_t)(length - 1) * (DIM / 2) + pair];
        angles.sine[i] = sines[(size_t)(length - 1) * (DIM / 2) + pair];
    }
#endif
    wait_for_before();
    start_dependents();
#if !ROPE
    fetch_first();
#endif
    uint4 q_high[CHUNKS], q_low[CHUNKS];
    {
        float q[CHUNKS][8];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) load_floats(q[c], row_q + 32 * c);
#if ROPE
        rotate(q, angles);
#endif
        float scale = group < GROUP ? rsqrtf(DIM) * LOG2_E : 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            float rest[8];
#pragma unroll
            for (int d = 0; d < 8; d++) {
                f16 high;
                put(&high, q[c][d] *= scale);
                rest[d] = q[c][d] - to_float(high);
            }
            q_high[c] = halves(q[c]), q_low[c] = halves(rest);
        }
    }

    float sums[HALVES * 4][4] = {}, largest[2] = {LOWEST, LOWEST}, total[2] = {};  // of heads 2 quarter + 0, 1
    auto attend = [&](int slot, int start) {
        auto &key = keys_of[slot];
        auto &value = values_of[slot];
#if ROPE
        int fresh = length - 1 - start;  // the new position's place in this tile
        const float *row_k = row + (HEADS + kv_head) * DIM + quarter * 8;
        const float *row_v = row + (HEADS + KV_HEADS + kv_head) * DIM + group * 8;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (fresh != group + 8 * h) continue;
            float k[CHUNKS][8];
            f16 *to = keys + place(length - 1) + quarter * 8;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) load_floats(k[c], row_k + 32 * c);
            rotate(k, angles);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) *(uint4 *)(to + 32 * c) = key[h][c] = halves(k[c]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (fresh != 2 * quarter + i % 2 + i / 2 * 8) continue;
            f16 *to = values + place(length - 1) + group * 8;
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                float v[8];
                load_floats(v, row_v + 64 * h);
                *(uint4 *)(to + 64 * h) = value[i][h] = halves(v);
            }
        }
#endif
        float score[4] = {}, rest[4] = {};  // of positions group and group + 8, each with the two heads
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            uint4 a = key[0][c], b = key[1][c];
            mma(score, a.x, b.x, a.y, b.y, q_high[c].x, q_high[c].y);
            mma(rest, a.x, b.x, a.y, b.y, q_low[c].x, q_low[c].y);
            mma(score, a.z, b.z, a.w, b.w, q_high[c].z, q_high[c].w);
            mma(rest, a.z, b.z, a.w, b.w, q_low[c].z, q_low[c].w);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) score[i] = start + group + i / 2 * 8 < end ? score[i] + rest[i] : -INFINITY_F;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = fmaxf(largest[h], over_groups<Max>(fmaxf(score[h], score[2 + h])));
            float correction = power(largest[h] - top);
            largest[h] = top;
            score[h] = power(score[h] - top), score[2 + h] = power(score[2 + h] - top);
            total[h] = total[h] * correction + score[h] + score[2 + h];
#pragma unroll
            for (int t = 0; t < HALVES * 4; t++) sums[t][h] *= correction, sums[t][2 + h] *= correction;
        }
        unsigned b0 = transposed(halves(score[0], score[1])), b1 = transposed(halves(score[2], score[3]));
#pragma unroll
        for (int t = 0; t < HALVES * 4; t++) {
            unsigned v0 = word(value[0][t / 4], t % 4), v1 = word(value[1][t / 4], t % 4);
            unsigned v2 = word(value[2][t / 4], t % 4), v3 = word(value[3][t / 4], t % 4);
            mma(sums[t], __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x5410),
                __byte_perm(v2, v3, 0x7632), b0, b1);
        }
    };
    for (int start = begin + warp * TILE; start < end; start += DEPTH * WARPS * TILE) {
#pragma unroll
        for (int slot = 0; slot < DEPTH; slot++) {
            int here = start + slot * WARPS * TILE;
            if (here >= end) break;
            attend(slot, here);
            fetch(slot, here + DEPTH * WARPS * TILE);  // beyond the end nothing is loaded
        }
    }

    // The warps of the block. Columns past GROUP are of no head.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int head = quarter * 2 + h;
        total[h] = over_groups<Sum>(total[h]);
        if (group == 0) warp_max[warp][head] = largest[h], warp_total[warp][head] = total[h];
        if (head >= GROUP) continue;
#pragma unroll
        for (int t = 0; t < HALVES * 4; t++) {
            *(float2 *)&warp_sums[warp][head][t / 4 * 64 + group * 8 + t % 4 * 2] = make_float2(sums[t][h], sums[t][2 + h]);
        }
    }
    __syncthreads();
    float *result = out + ((size_t)m * HEADS + kv_head * GROUP) * DIM;
#if CLUSTER
    __shared__ float mine[GROUP * (DIM + 2)];  // a part: sums, then maxima, then totals
#elif SPLITS > 1
    float *first = parts + ((size_t)m * KV_HEADS + kv_head) * SPLITS * GROUP * (DIM + 2);
    float *mine = first + split * GROUP * (DIM + 2);
#endif
    for (int i = threadIdx.x; i < GROUP * DIM; i += WARPS * WARP) {
        int h = i / DIM, d = i % DIM;
        float top = LOWEST, sum = 0.0f, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, warp_max[w][h]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float scale = power(warp_max[w][h] - top);
            sum += warp_sums[w][h][d] * scale;
            weight += warp_total[w][h] * scale;
        }
#if SPLITS == 1
        result[i] = sum / weight;
#else
        mine[i] = sum;
        if (d == 0) mine[GROUP * DIM + h] = top, mine[GROUP * (DIM + 1) + h] = weight;
#endif
    }
#if SPLITS > 1
    // at(s, i): a float of the part of split s.
#if CLUSTER
    auto at = [&](int s, int i) {
        float v;
        asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(in_block(mine + i, s)) : "memory");
        return v;
    };
    int share = split, shares = SPLITS;
    cluster_arrive(), cluster_wait();
#else
    auto at = [&](int s, int i) { return ((const volatile float *)first)[s * GROUP * (DIM + 2) + i]; };
    int share = 0, shares = 1;
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(arrivals + m * KV_HEADS + kv_head, SPLITS - 1) == SPLITS - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
#endif
    for (int i = share * WARPS * WARP + threadIdx.x; i < GROUP * DIM; i += shares * WARPS * WARP) {
        float sum = 0.0f, weight = 0.0f, top = LOWEST;
#pragma unroll 8
        for (int s = 0; s < SPLITS; s++) top = fmaxf(top, at(s, GROUP * DIM + i / DIM));
#pragma unroll 8
        for (int s = 0; s < SPLITS; s++) {
            float scale = power(at(s, GROUP * DIM + i / DIM) - top);
            sum += at(s, i) * scale;
            weight += at(s, GROUP * (DIM + 1) + i / DIM) * scale;
        }
        result[i] = sum / weight;
    }
#if CLUSTER
    cluster_arrive(), cluster_wait();  // no block may end while another reads its part
#endif
#endif
}
