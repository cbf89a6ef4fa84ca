// Norms (where NORMS; after the rotation where NORMS_LAST) and rotates q in place, and stores k (the same) and v in the paged cache. A
// warp a head of a token; a lane two pairs, or four values of v, at a time.
#include "cache.cuh"
#define TURNS ((DIM / 2 + 2 * WARP - 1) / (2 * WARP))

// Two pairs of a head: their first halves, then their second.
__device__ __forceinline__ float4 pairs_at(const float *row, int pair, bool side_by_side) {
    if (side_by_side) {
        float2 a = *(const float2 *)(row + pair), b = *(const float2 *)(row + DIM / 2 + pair);
        return make_float4(a.x, a.y, b.x, b.y);
    }
    float4 both = *(const float4 *)(row + 2 * pair);
    return make_float4(both.x, both.z, both.y, both.w);
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rope_append(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, float *qkv,
            kv_t *keys, kv_t *values, const float *cosines, const float *sines, const float *q_norm, const float *k_norm, float eps) {
    int m = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (m >= STEP_TOKENS(step) || head >= HEADS + 2 * KV_HEADS) return;
    int p = token_position(step, token_seq, seq_begin, seq_len, m);
    int block = step[block_table + step[token_seq + m] * max_blocks + p / BLOCK];
    float *row = qkv + ((size_t)m * (HEADS + 2 * KV_HEADS) + head) * DIM;
    bool value = head >= HEADS + KV_HEADS, side_by_side = NEOX || value;
    wait_for_before();
    start_dependents();
    float4 held[TURNS] = {};
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int pair = 2 * (lane + i * WARP);
        if (pair < DIM / 2) held[i] = pairs_at(row, pair, side_by_side);
    }
    auto normalise = [&] {
        const float *norm = head < HEADS ? q_norm : k_norm;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TURNS; i++) sum += squares(held[i]);
        float inverse = 1.0f / sqrtf(warp_reduce<Sum>(sum) / DIM + eps);
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int pair = 2 * (lane + i * WARP);
            if (pair < DIM / 2) held[i] = times(times(held[i], inverse), pairs_at(norm, pair, NEOX));
        }
    };
    if (NORMS && !NORMS_LAST && !value) normalise();
    if (!value) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int pair = 2 * (lane + i * WARP);
            if (pair >= DIM / 2) break;
            float2 c = *(const float2 *)(cosines + (size_t)p * (DIM / 2) + pair), s = *(const float2 *)(sines + (size_t)p * (DIM / 2) + pair);
            float4 v = held[i];
            held[i] = make_float4(v.x * c.x - v.z * s.x, v.y * c.y - v.w * s.y, v.z * c.x + v.x * s.x, v.w * c.y + v.y * s.y);
        }
    }
    if (NORMS_LAST && !value) normalise();
    int kv_head = (head - HEADS) % KV_HEADS;
    kv_t *cache = value ? values : keys, *to = cache + row_of(block, p % BLOCK, kv_head, KV_HEADS);
    float factor = 1.0f;
#if KV_I8
    if (head >= HEADS) {
        RowUnit unit = row_unit(*(const float(*)[TURNS][4])held);
        factor = unit.factor;
        if (lane == 0) *scale_of(cache, block, p % BLOCK, kv_head, KV_HEADS) = unit.scale;
    }
#endif
    auto store = [&](int at, float a, float b) {
        put(to + at, a * factor), put(to + at + 1, b * factor);
    };
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int pair = 2 * (lane + i * WARP);
        if (pair >= DIM / 2) break;
        float4 v = held[i];
        if (head < HEADS) {
            if (NEOX) *(float2 *)(row + pair) = make_float2(v.x, v.y), *(float2 *)(row + DIM / 2 + pair) = make_float2(v.z, v.w);
            else *(float4 *)(row + 2 * pair) = make_float4(v.x, v.z, v.y, v.w);
        } else if (side_by_side) {
            store(pair, v.x, v.y), store(DIM / 2 + pair, v.z, v.w);
        } else {
            store(2 * pair, v.x, v.z), store(2 * pair + 2, v.y, v.w);
        }
    }
}
