// variants: KV_I8
// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q, then k, then v heads).
// Cache: [blocks, BLOCK, kv_heads, DIM]. An invocation has two pairs at a time, so that f16 is stored in whole words.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int NEOX = 1;
BUFFER(0, readonly, int, step_data);
BUFFER(1, , float, qkv);
BUFFER(2, writeonly, uint, keys);
BUFFER(3, writeonly, uint, values);
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };

#include "cache.glsl"
#if KV_I8
shared vec4 exact[DIM / 4];  // a row before it becomes codes
shared uint greatest;

void store_key(uint place, uint i, float a, float b) {
    exact[i / 4][i % 4] = a;
    exact[i / 4][i % 4 + 1] = b;
}

void store_value(uint place, uint i, float a, float b) { store_key(place, i, a, b); }
#else
void store_key(uint place, uint i, float a, float b) {
    uint at = place + i;
    if (KV_F16 != 0) keys[at / 2] = half_pair(a, b);
    else {
        keys[at] = floatBitsToUint(a);
        keys[at + 1] = floatBitsToUint(b);
    }
}

void store_value(uint place, uint i, float a, float b) {
    uint at = place + i;
    if (KV_F16 != 0) values[at / 2] = half_pair(a, b);
    else {
        values[at] = floatBitsToUint(a);
        values[at + 1] = floatBitsToUint(b);
    }
}
#endif

void rotate_or_store(uint row, uint place, int head, uint angles) {
    if (head >= heads + kv_heads) {
        for (uint i = 2 * LANE; i < DIM; i += 2 * WG) store_value(place, i, qkv[row + i], qkv[row + i + 1]);
        return;
    }
    for (uint i = 2 * LANE; i < DIM / 2; i += 2 * WG) {  // the angles i and i + 1
        // Where the pairs' first and second members are: next to one another, or half a head apart.
        uint a0 = NEOX != 0 ? i : 2 * i, a1 = NEOX != 0 ? i + 1 : 2 * i + 2;
        uint apart = NEOX != 0 ? DIM / 2 : 1;
        uint angle = angles + i;
        vec2 c = vec2(cosines[angle], cosines[angle + 1]), s = vec2(sines[angle], sines[angle + 1]);
        vec2 a = vec2(qkv[row + a0], qkv[row + a1]), b = vec2(qkv[row + a0 + apart], qkv[row + a1 + apart]);
        vec2 first = a * c - b * s, second = b * c + a * s;
        if (head < heads) {
            qkv[row + a0] = first.x;
            qkv[row + a1] = first.y;
            qkv[row + a0 + apart] = second.x;
            qkv[row + a1 + apart] = second.y;
        } else if (NEOX != 0) {
            store_key(place, i, first.x, first.y);
            store_key(place, i + DIM / 2, second.x, second.y);
        } else {
            store_key(place, 2 * i, first.x, second.x);
            store_key(place, 2 * i + 2, first.y, second.y);
        }
    }
}

KERNEL(rope_append) {
    int m = int(gl_WorkGroupID.x), head = int(gl_WorkGroupID.y);
    if (m >= STEP_TOKENS) return;
    int position = TOKEN_POSITION(m);
    uint row = (m * uint(heads + 2 * kv_heads) + head) * DIM;
    uint block = step_data[block_table + step_data[token_seq + m] * max_blocks + position / BLOCK];
    uint kv_head = head < heads + kv_heads ? head - heads : head - heads - kv_heads;
    uint place = ((block * BLOCK + position % BLOCK) * kv_heads + kv_head) * DIM;
    rotate_or_store(row, place, head, position * (DIM / 2));
#if KV_I8
    if (head < heads) return;
    if (LANE == 0) greatest = 0;
    barrier();
    for (uint i = LANE; i < DIM / 4; i += WG) atomicMax(greatest, magnitude_bits(exact[i]));
    barrier();
    vec2 unit = row_unit(greatest);
    uvec2 to = row_of(block, position, kv_head, kv_heads);
    bool is_value = head >= heads + kv_heads;
    for (uint i = LANE; i < DIM / 4; i += WG) {
        uint codes = quantised(exact[i] * unit.x);
        if (is_value) values[to.x + i] = codes;
        else keys[to.x + i] = codes;
    }
    if (LANE == 0) {
        if (is_value) values[to.y] = floatBitsToUint(unit.y);
        else keys[to.y] = floatBitsToUint(unit.y);
    }
#endif
}
