// Constants and single steps of attention_decode: loads, products, sums over lanes, and messages between blocks.
#include "attention.cuh"
#include "cache.cuh"
#define GROUP (HEADS / KV_HEADS)
#define OWN (DIM < 128 ? DIM : 128) /* dimensions of a warp */
#define SHARERS (DIM / OWN)         /* warps of a team, which share its tiles */
#define TEAMS (WARPS / SHARERS)
#define CHUNKS (OWN / 32) /* of a warp's part of a row, 8 dimensions for each of 4 threads */
#define HALVES (OWN / 64) /* of that, 8 dimensions for each of 8 threads */
#define KEY_EACH (16 / (int)sizeof(kv_t)) /* dimensions that a thread loads at once */
#define VALUE_EACH (KEY_EACH < OWN / 8 ? KEY_EACH : OWN / 8)
#define KEY_LOADS (OWN / 4 / KEY_EACH)
#define VALUE_LOADS (OWN / 8 / VALUE_EACH)
#define TILE 16
#define THREADS (WARPS * WARP)
#define PAIRS (DIM / 2)
#ifndef ROTATED
#define ROTATED PAIRS /* pairs of a head that are rotated */
#endif
#define Q_PITCH (DIM + 32) /* so that neighbouring heads fall into different halves of the banks */
#define SUMS (GROUP * DIM) /* of a token and key/value head */
#if CLUSTER
#define RANKS CLUSTER
#else
#define RANKS 1
#endif
#define PARTS (SPLITS / RANKS) /* merged through memory */
#define SHARE (SUMS / RANKS)   /* dimensions that a block of a cluster merges */
#if RING
#define PIECES (DIM * (int)sizeof(kv_t) / 16) /* of 16 bytes, of a row */
#define SIDE (TILE * PIECES)                  /* of a tile's keys, and of its values */
#if KV_I8
#define PLACE (2 * SIDE + TILE / 2) /* of a tile in the ring, with the scales of keys and of values at its end */
#else
#define PLACE (2 * SIDE)
#endif
// The pieces of row r are exchanged, so that neither those of keys nor those of values that lanes read at once share banks.
#define TURNED(r) (((r) >> 1 & 3) << 1 ^ ((r) & 1) << 2)
#endif
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below any score, and finite: the difference of two is no NaN */
#if CLUSTER
#define IN_CLUSTER __cluster_dims__(1, 1, CLUSTER)
#else
#define IN_CLUSTER
#endif

// From the second-level cache: another kernel may have written it while this one was waiting.
template <int BYTES = 16>
__device__ __forceinline__ uint4 load(const void *p) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (BYTES == 16) {
        asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    } else {
        asm volatile("ld.global.cg.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    }
    return v;
}

// Sum i of a share of several splits: the sum, their maximum, and the total weight. (A generic lambda in the kernel would be a host
// function to NVRTC 13.0.)
template <class Sum, class Weight>
__device__ __forceinline__ float4 merged(int count, Sum sum_of, Weight weight_of, int i, int h) {
    float sum = 0.0f, weight = 0.0f, top = LOWEST;
#pragma unroll 8
    for (int s = 0; s < count; s++) top = fmaxf(top, weight_of(s, h).x);
#pragma unroll 8
    for (int s = 0; s < count; s++) {
        float2 of = weight_of(s, h);
        float scale = power(of.x - top);
        sum += sum_of(s, i) * scale;
        weight += of.y * scale;
    }
    return make_float4(sum, top, weight, 0.0f);
}

__device__ __forceinline__ float load_scale(const float *p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned transposed(unsigned m) {
    unsigned out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(m));
    return out;
}

__device__ __forceinline__ unsigned word(uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Sum or maximum over the lanes; those of equal `quarter` hold the same head.
template <class Op>
__device__ __forceinline__ float over_groups(float v) {
    for (int i = 4; i < WARP; i *= 2) v = Op::of(v, __shfl_xor_sync(FULL, v, i));
    return v;
}

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
