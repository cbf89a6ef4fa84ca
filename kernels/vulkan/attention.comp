// variants: SUBGROUPS
// Causal attention of one token and head per work-group, over the paged cache, in chunks of WG positions with a running
// maximum (Milakov and Gimelshein 2018). Invocations first take a position each (scores), then four dimensions (values).
// Serves any shape; attention_decode and attention_prefill are for those that matter.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int KV_I8 = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
BUFFER(2, readonly, uint, keys);
BUFFER(3, readonly, uint, values);
BUFFER(4, writeonly, vec4, result);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };
#include "cache.glsl"
const int QUADS = DIM / 4, PER_LANE = (QUADS + WG - 1) / WG;
shared vec4 query[QUADS];
shared float weight[WG];
shared uint place[WG];

vec4 key(uint i) {
    if (KV_I8 != 0) return codes_of(keys[i], 1.0);
    if (KV_F16 != 0) return vec4(unpackHalf2x16(keys[2 * i]), unpackHalf2x16(keys[2 * i + 1]));
    return uintBitsToFloat(uvec4(keys[4 * i], keys[4 * i + 1], keys[4 * i + 2], keys[4 * i + 3]));
}

vec4 value(uint i) {
    if (KV_I8 != 0) return codes_of(values[i], 1.0);
    if (KV_F16 != 0) return vec4(unpackHalf2x16(values[2 * i]), unpackHalf2x16(values[2 * i + 1]));
    return uintBitsToFloat(uvec4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]));
}

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
    for (int start = 0; start < length; start += WG) {
        barrier();
        int p = start + lane;
        float score = -INFINITY;
        uint scale = 0;
        if (p < length) {
            uint block = step_data[table + p / BLOCK], row = p % BLOCK * kv_heads + kv_head;
            uint at = KV_I8 != 0 ? block * BLOCK_WORDS + row * QUADS : (block * BLOCK_ROWS + row) * QUADS;
            scale = block * BLOCK_WORDS + BLOCK_CODES + row;
            place[lane] = at;
            score = 0.0;
            for (int i = 0; i < QUADS; i++) score += dot(query[i], key(at + i));
            if (KV_I8 != 0) score *= uintBitsToFloat(keys[scale]);
        }
        float before = largest;
        largest = max(largest, group_sum_max(0.0, score).y);
        float w = exp(score - largest), correction = exp(before - largest);
        weight[lane] = KV_I8 != 0 && p < length ? w * uintBitsToFloat(values[scale]) : w;
        total = total * correction + group_sum_max(w, 0.0).x;  // its barriers publish `weight` and `place`
        int count = min(WG, length - start);
        for (int d = 0; d < PER_LANE; d++) {
            int i = lane + d * WG;
            if (i >= QUADS) break;
            vec4 sum = sums[d] * correction;
            for (int t = 0; t < count; t++) sum += weight[t] * value(place[t] + i);
            sums[d] = sum;
        }
    }
    for (int d = 0; d < PER_LANE; d++) {
        int i = lane + d * WG;
        if (i < QUADS) result[(m * uint(heads) + head) * QUADS + i] = sums[d] / total;
    }
}
