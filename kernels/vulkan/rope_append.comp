// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q, then k, then v heads).
// Cache: [blocks, BLOCK, kv_heads, DIM]. An invocation has two pairs at a time, so that f16 is stored in whole words.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int NEOX = 1;
layout(constant_id = 5) const int KV_I8 = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, , float, qkv);
BUFFER(2, writeonly, uint, keys);
BUFFER(3, writeonly, uint, values);
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };

#include "cache.glsl"
shared float exact[KV_I8 != 0 ? DIM : 1];  // a row before it becomes codes
shared uint greatest;

void store_key(uint at, float a, float b) {
    if (KV_I8 != 0) {
        exact[at] = a;
        exact[at + 1] = b;
    } else if (KV_F16 != 0) keys[at / 2] = half_pair(a, b);
    else {
        keys[at] = floatBitsToUint(a);
        keys[at + 1] = floatBitsToUint(b);
    }
}

void store_value(uint at, float a, float b) {
    if (KV_I8 != 0) store_key(at, a, b);
    else if (KV_F16 != 0) values[at / 2] = half_pair(a, b);
    else {
        values[at] = floatBitsToUint(a);
        values[at + 1] = floatBitsToUint(b);
    }
}

// Stores the row that `exact` holds. The whole work-group calls it.
void store_codes(uint block, uint row, bool is_key) {
    if (LANE == 0) greatest = 0;
    barrier();
    for (uint i = LANE; i < DIM; i += WG) atomicMax(greatest, magnitude_bits(exact[i]));
    barrier();
    vec2 unit = row_unit(greatest);
    uint first = block * BLOCK_WORDS;
    for (uint i = LANE; i <= DIM / 4; i += WG) {
        uint word = i == DIM / 4 ? floatBitsToUint(unit.y) : 0, at = i == DIM / 4 ? BLOCK_CODES + row : row * (DIM / 4) + i;
        if (i < DIM / 4) word = quantised(vec4(exact[4 * i], exact[4 * i + 1], exact[4 * i + 2], exact[4 * i + 3]) * unit.x);
        if (is_key) keys[first + at] = word;
        else values[first + at] = word;
    }
}

KERNEL(rope_append) {
    int m = int(gl_WorkGroupID.x), head = int(gl_WorkGroupID.y);
    if (m >= STEP_TOKENS) return;
    int position = TOKEN_POSITION(m);
    uint row = (m * uint(heads + 2 * kv_heads) + head) * DIM;
    uint block = step_data[block_table + step_data[token_seq + m] * max_blocks + position / BLOCK];
    uint kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    uint cache_row = position % BLOCK * kv_heads + kv_head;
    uint place = KV_I8 != 0 ? 0 : (block * BLOCK_ROWS + cache_row) * DIM;
    bool is_value = head >= heads + kv_heads;
    if (is_value) {
        for (uint i = 2 * LANE; i < DIM; i += 2 * WG) store_value(place + i, qkv[row + i], qkv[row + i + 1]);
    } else {
        for (uint i = 2 * LANE; i < DIM / 2; i += 2 * WG) {  // the angles i and i + 1
            // Where the pairs' first and second members are: next to one another, or half a head apart.
            uint a0 = NEOX != 0 ? i : 2 * i, a1 = NEOX != 0 ? i + 1 : 2 * i + 2;
            uint apart = NEOX != 0 ? DIM / 2 : 1;
            uint angle = position * (DIM / 2) + i;
            vec2 c = vec2(cosines[angle], cosines[angle + 1]), s = vec2(sines[angle], sines[angle + 1]);
            vec2 a = vec2(qkv[row + a0], qkv[row + a1]), b = vec2(qkv[row + a0 + apart], qkv[row + a1 + apart]);
            vec2 first = a * c - b * s, second = b * c + a * s;
            if (head < heads) {
                qkv[row + a0] = first.x;
                qkv[row + a1] = first.y;
                qkv[row + a0 + apart] = second.x;
                qkv[row + a1 + apart] = second.y;
            } else if (NEOX != 0) {
                store_key(place + i, first.x, first.y);
                store_key(place + i + DIM / 2, second.x, second.y);
            } else {
                store_key(place + 2 * i, first.x, second.x);
                store_key(place + 2 * i + 2, first.y, second.y);
            }
        }
    }
    if (KV_I8 != 0 && head >= heads) store_codes(block, cache_row, !is_value);
}
