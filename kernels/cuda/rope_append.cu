// Rotates q in place, and stores k (rotated) and v in the paged cache. A warp a head of a token; a lane two pairs, or four values
// of v, at a time.
#include "cache.cuh"
#define TURNS ((DIM / 2 + 2 * WARP - 1) / (2 * WARP))

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rope_append(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, float *qkv,
            kv_t *keys, kv_t *values, const float *cosines, const float *sines) {
    int m = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (m >= STEP_TOKENS(step) || head >= HEADS + 2 * KV_HEADS) return;
    int p = token_position(step, token_seq, seq_begin, seq_len, m);
    int block = step[block_table + step[token_seq + m] * max_blocks + p / BLOCK];
    float *row = qkv + ((size_t)m * (HEADS + 2 * KV_HEADS) + head) * DIM;
    bool value = head >= HEADS + KV_HEADS, side_by_side = NEOX || value;
    wait_for_before();
    start_dependents();
    float held[TURNS][4] = {};  // two pairs, their first halves before their second
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int pair = 2 * (lane + i * WARP);
        if (pair >= DIM / 2) break;
        float2 a, b, x, y;
        if (side_by_side) {
            a = *(const float2 *)(row + pair), b = *(const float2 *)(row + DIM / 2 + pair);
        } else {
            float4 both = *(const float4 *)(row + 2 * pair);
            a = make_float2(both.x, both.z), b = make_float2(both.y, both.w);
        }
        x = a, y = b;
        if (!value) {
            float2 c = *(const float2 *)(cosines + (size_t)p * (DIM / 2) + pair), s = *(const float2 *)(sines + (size_t)p * (DIM / 2) + pair);
            x = make_float2(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
            y = make_float2(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
        }
        held[i][0] = x.x, held[i][1] = x.y, held[i][2] = y.x, held[i][3] = y.y;
    }
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
    auto store = [&](int at, float a, float b) {
        put(to + at, a * factor), put(to + at + 1, b * factor);
    };
#pragma unroll
    for (int i = 0; i < TURNS; i++) {
        int pair = 2 * (lane + i * WARP);
        if (pair >= DIM / 2) break;
        auto &v = held[i];
        if (head < HEADS) {
            if (NEOX) *(float2 *)(row + pair) = make_float2(v[0], v[1]), *(float2 *)(row + DIM / 2 + pair) = make_float2(v[2], v[3]);
            else *(float4 *)(row + 2 * pair) = make_float4(v[0], v[2], v[1], v[3]);
        } else if (side_by_side) {
            store(pair, v[0], v[1]), store(DIM / 2 + pair, v[2], v[3]);
        } else {
            store(2 * pair, v[0], v[2]), store(2 * pair + 2, v[1], v[3]);
        }
    }
}
