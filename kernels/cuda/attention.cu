// Causal attention of one token and head per block, over the paged cache, in chunks of WG positions with a running
// maximum (Milakov and Gimelshein 2018). Threads first take a position each (scores), then dimensions (values).
#include "cache.cuh"
#include "window.cuh"
#define PER_THREAD ((DIM + WG - 1) / WG)

extern "C" __global__ void attention(const int *step, int token_seq, int seq_begin, int seq_len, int block_table,
                                     int max_blocks, const float *qkv, const kv_t *keys, const kv_t *values, float *out,
                                     int heads, int kv_heads) {
    __shared__ float query[DIM], weight[WG];
    __shared__ size_t place[WG];
    int m = blockIdx.x, head = blockIdx.y, lane = threadIdx.x;
    if (m >= STEP_TOKENS(step)) return;
    int length = token_position(step, token_seq, seq_begin, seq_len, m) + 1;
    const int *table = step + block_table + step[token_seq + m] * max_blocks;
    int kv_head = head / (heads / kv_heads);
    const float *row = qkv + ((size_t)m * (heads + 2 * kv_heads) + head) * DIM;
    for (int i = lane; i < DIM; i += WG) query[i] = row[i] / sqrtf((float)DIM);
    float sums[PER_THREAD] = {};
    float largest = -INFINITY_F, total = 0.0f;
    for (int start = window_begin(length); start < length; start += WG) {
        __syncthreads();
        int p = start + lane;
        float score = -INFINITY_F;
        if (p < length) {
            size_t at = row_of(table[p / BLOCK], p % BLOCK, kv_head, kv_heads);
            place[lane] = at;
            score = 0.0f;
            for (int i = 0; i < DIM; i++) score += query[i] * to_float(keys[at + i]);
#if KV_I8
            score *= *scale_of(keys, table[p / BLOCK], p % BLOCK, kv_head, kv_heads);
#endif
        }
        float before = largest;
        largest = fmaxf(largest, block_reduce<Max>(score));
        float w = expf(score - largest), correction = expf(before - largest);
        weight[lane] = w;
#if KV_I8
        if (p < length) weight[lane] = w * *scale_of(values, table[p / BLOCK], p % BLOCK, kv_head, kv_heads);
#endif
        total = total * correction + block_reduce<Sum>(w);  // its barriers publish `weight` and `place`
        int count = min(WG, length - start);
        for (int d = 0; d < PER_THREAD; d++) {
            int i = lane + d * WG;
            if (i >= DIM) break;
            float sum = sums[d] * correction;
            for (int t = 0; t < count; t++) sum += weight[t] * to_float(values[place[t] + i]);
            sums[d] = sum;
        }
    }
    for (int d = 0; d < PER_THREAD; d++) {
        int i = lane + d * WG;
        if (i < DIM) out[((size_t)m * heads + head) * DIM + i] = sums[d] / total;
    }
}
