// variants: SUBGROUPS KV_I8
// Causal attention of one token and head per work-group, over the paged cache, in chunks of WG positions with a running
// maximum (Milakov and Gimelshein 2018). Invocations first take a position each (scores), then four dimensions (values).
// Serves any shape; attention_decode and attention_prefill are for those that matter.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int WINDOW = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
BUFFER(2, readonly, uint, keys);
BUFFER(3, readonly, uint, values);
BUFFER(4, writeonly, vec4, result);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };
const int QUADS = DIM / 4, PER_LANE = (QUADS + WG - 1) / WG;
shared vec4 query[QUADS];
shared float weight[WG];
#include "cache.glsl"
#include "window.glsl"
#if KV_I8
#define Row uvec2
Row row_at(uint block, uint position, uint kv_head) { return row_of(block, position, kv_head, kv_heads); }
vec4 key(Row row, uint quad) { return coded(keys[row.x + quad]) * uintBitsToFloat(keys[row.y]); }
vec4 value(Row row, uint quad) { return coded(values[row.x + quad]) * uintBitsToFloat(values[row.y]); }
#else
#define Row uint
Row row_at(uint block, uint position, uint kv_head) { return ((block * BLOCK + position % BLOCK) * kv_heads + kv_head) * QUADS; }

vec4 key(Row row, uint quad) {
    uint i = row + quad;
    if (KV_F16 != 0) return vec4(unpackHalf2x16(keys[2 * i]), unpackHalf2x16(keys[2 * i + 1]));
    return uintBitsToFloat(uvec4(keys[4 * i], keys[4 * i + 1], keys[4 * i + 2], keys[4 * i + 3]));
}

vec4 value(Row row, uint quad) {
    uint i = row + quad;
    if (KV_F16 != 0) return vec4(unpackHalf2x16(values[2 * i]), unpackHalf2x16(values[2 * i + 1]));
    return uintBitsToFloat(uvec4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]));
}
#endif
shared Row place[WG];

KERNEL(attention) {
    int m = int(gl_WorkGroupID.x), head = int(gl_WorkGroupID.y), lane = LANE;
    if (m >= STEP_TOKENS) return;
    int length = TOKEN_POSITION(m) + 1;
    int table = block_table + step_data[token_seq + m] * max_blocks;
    uint kv_head = head / (heads / kv_heads);
    uint row = (m * uint(heads + 2 * kv_heads) + head) * QUADS;
    for (uint i = lane; i < QUADS; i += WG) query[i] = qkv[row + i] / sqrt(float(DIM));
    vec4 sums[PER_LANE];
    for (int i = 0; i < PER_LANE; i++) sums[i] = vec4(0.0);
    float largest = -INFINITY, total = 0.0;
    for (int start = WINDOW_BEGIN(length); start < length; start += WG) {
        barrier();
        int p = start + lane;
        float score = -INFINITY;
        if (p < length) {
            Row at = row_at(step_data[table + p / BLOCK], p, kv_head);
            place[lane] = at;
            score = 0.0;
            for (int i = 0; i < QUADS; i++) score += dot(query[i], key(at, i));
        }
        float before = largest;
        largest = max(largest, group_sum_max(0.0, score).y);
        float w = exp(score - largest), correction = exp(before - largest);
        weight[lane] = w;
        total = total * correction + group_sum_max(w, 0.0).x;  // its barriers publish `weight` and `place`
        int count = min(WG, length - start);
        for (int d = 0; d < PER_LANE; d++) {
            int i = lane + d * WG;
            if (i >= QUADS) break;
            vec4 sum = sums[d] * correction;
            for (int t = 0; t < count; t++) sum += weight[t] * value(place[t], i);
            sums[d] = sum;
        }
    }
    for (int d = 0; d < PER_LANE; d++) {
        int i = lane + d * WG;
        if (i < QUADS) result[(m * uint(heads) + head) * QUADS + i] = sums[d] / total;
    }
}
