// Rotates q in place, and stores k (rotated) and v in the paged cache. A warp a head of a token; a lane two pairs, or four values
// of v, at a time.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
rope_append(const int *step, int token_seq, int seq_begin, int seq_len, int block_table, int max_blocks, float *qkv,
            kv_t *keys, kv_t *values, const float *cosines, const float *sines) {
    int m = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (m >= STEP_TOKENS(step) || head >= HEADS + 2 * KV_HEADS) return;
    int p = token_position(step, token_seq, seq_begin, seq_len, m);
    int block = step[block_table + step[token_seq + m] * max_blocks + p / BLOCK];
    size_t slot = ((size_t)block * BLOCK + p % BLOCK) * KV_HEADS;
    float *row = qkv + ((size_t)m * (HEADS + 2 * KV_HEADS) + head) * DIM;
    kv_t *to = head < HEADS + KV_HEADS ? keys + (slot + head - HEADS) * DIM : values + (slot + head - HEADS - KV_HEADS) * DIM;
    auto store = [](kv_t *at, float a, float b) {
        put(at, a), put(at + 1, b);
    };
    wait_for_before();
    start_dependents();
    for (int pair = 2 * lane; pair < DIM / 2; pair += 2 * WARP) {
        float2 a, b;
        if (NEOX || head >= HEADS + KV_HEADS) {
            a = *(const float2 *)(row + pair), b = *(const float2 *)(row + DIM / 2 + pair);
        } else {
            float4 both = *(const float4 *)(row + 2 * pair);
            a = make_float2(both.x, both.z), b = make_float2(both.y, both.w);
        }
        if (head >= HEADS + KV_HEADS) {
            store(to + pair, a.x, a.y), store(to + DIM / 2 + pair, b.x, b.y);
            continue;
        }
        float2 c = *(const float2 *)(cosines + (size_t)p * (DIM / 2) + pair), s = *(const float2 *)(sines + (size_t)p * (DIM / 2) + pair);
        float2 x = make_float2(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
        float2 y = make_float2(b.x * c.x + a.x * s.x, b.y * c.y + a.y * s.y);
        if (head < HEADS) {
            if (NEOX) *(float2 *)(row + pair) = x, *(float2 *)(row + DIM / 2 + pair) = y;
            else *(float4 *)(row + 2 * pair) = make_float4(x.x, y.x, x.y, y.y);
        } else if (NEOX) {
            store(to + pair, x.x, x.y), store(to + DIM / 2 + pair, y.x, y.y);
        } else {
            store(to + 2 * pair, x.x, y.x), store(to + 2 * pair + 2, x.y, y.y);
        }
    }
}
