// rope_append for heads of which only the first 2 * PAIRS elements are rotated. A warp a head of a token.
#include "cache.cuh"
#define TURNS ((DIM + 4 * WARP - 1) / (4 * WARP))

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rope_part(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, float *qkv,
          kv_t *keys, kv_t *values, const float *cosines, const float *sines, const float *q_norm, const float *k_norm, float eps) {
    int m = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (m >= STEP_TOKENS(step) || head >= HEADS + 2 * KV_HEADS) return;
    int p = token_position(step, token_seq, seq_begin, seq_len, m);
    int block = step[block_table + step[token_seq + m] * max_blocks + p / BLOCK];
    float *row = qkv + ((size_t)m * (HEADS + 2 * KV_HEADS) + head) * DIM;
    bool value = head >= HEADS + KV_HEADS;
    wait_for_before();
    start_dependents();
    float held[TURNS][4] = {};  // elements lane, lane + 32, …
    float inverse = 1.0f;
    const float *norm = head < HEADS ? q_norm : k_norm;
#if NORMS && !NORMS_LAST
    if (!value) {
        float sum = 0.0f;
        for (int i = lane; i < DIM; i += WARP) sum += row[i] * row[i];
        inverse = 1.0f / sqrtf(warp_reduce<Sum>(sum) / DIM + eps);
    }
#endif
    auto normed = [&](int i) { return NORMS && !NORMS_LAST && !value ? row[i] * inverse * norm[i] : row[i]; };
#pragma unroll
    for (int turn = 0; turn < 4 * TURNS; turn++) {
        int i = lane + turn * WARP;
        if (i >= DIM) break;
        float y = normed(i);
        if (!value && i < 2 * PAIRS) {
            int pair = NEOX ? i % PAIRS : i / 2;
            bool second = NEOX ? i >= PAIRS : i % 2;
            float other = normed(NEOX ? (second ? i - PAIRS : i + PAIRS) : i ^ 1);
            float c = cosines[(size_t)p * PAIRS + pair], s = sines[(size_t)p * PAIRS + pair];
            y = second ? y * c + other * s : y * c - other * s;
        }
        held[turn / 4][turn % 4] = y;
    }
#if NORMS_LAST
    if (!value) {
        float sum = 0.0f;
#pragma unroll
        for (int turn = 0; turn < 4 * TURNS; turn++) sum += held[turn / 4][turn % 4] * held[turn / 4][turn % 4];
        inverse = 1.0f / sqrtf(warp_reduce<Sum>(sum) / DIM + eps);
#pragma unroll
        for (int turn = 0; turn < 4 * TURNS; turn++) {
            int i = lane + turn * WARP;
            if (i < DIM) held[turn / 4][turn % 4] *= inverse * norm[i];
        }
    }
#endif
    __syncwarp();  // all have read the row
    int kv_head = (head - HEADS) % KV_HEADS;
    kv_t *cache = value ? values : keys, *to = cache + row_of(block, p % BLOCK, kv_head, KV_HEADS);
    float factor = 1.0f;
#if KV_I8
    if (head >= HEADS) {
        RowUnit unit = row_unit(held);
        factor = unit.factor;
        if (lane == 0) *scale_of(cache, block, p % BLOCK, kv_head, KV_HEADS) = unit.scale;
    }
#endif
#pragma unroll
    for (int turn = 0; turn < 4 * TURNS; turn++) {
        int i = lane + turn * WARP;
        if (i >= DIM) break;
        if (head < HEADS) row[i] = held[turn / 4][turn % 4];
        else put(to + i, held[turn / 4][turn % 4] * factor);
    }
}
