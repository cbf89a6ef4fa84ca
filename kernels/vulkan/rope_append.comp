// variants: KV_I8 NORMS_LAST
// Rotates q in place, stores rotated k, and v, in the cache. One work-group per token and head (q, then k, then v heads).
// Cache: [blocks, BLOCK, kv_heads, DIM]. An invocation stores two dimensions at a time: f16 makes whole words.
// NORMS_LAST: heads of q and k are normed after their rotation.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int NEOX = 1;
layout(constant_id = 5) const int PAIRS = 0;  // of a head that are rotated; 0: all
const int TURNED = PAIRS > 0 ? PAIRS : DIM / 2;
const int APART = NEOX != 0 ? TURNED : 1;  // between the members of a pair
BUFFER(0, readonly, int, step_data);
BUFFER(1, , float, qkv);
BUFFER(2, writeonly, uint, keys);
BUFFER(3, writeonly, uint, values);
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
#if NORMS_LAST
BUFFER(6, readonly, float, q_norm);
BUFFER(7, readonly, float, k_norm);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; float eps; };
float root = 1.0;  // of the mean square of the head, which is rotated
#else
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, heads, kv_heads; };
#endif

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

// Pair i of a head, rotated.
vec2 rotated_pair(uint row, uint i, uint angles) {
    uint first = row + (NEOX != 0 ? i : 2 * i);
    float a = qkv[first], b = qkv[first + APART], c = cosines[angles + i], s = sines[angles + i];
    return vec2(a * c - b * s, b * c + a * s);
}

#if NORMS_LAST
float normed(float value, uint d, int head) { return value * (head < heads ? q_norm[d] : k_norm[d]) / root; }

void find_root(uint row, uint angles) {
    float squares = 0.0;
    for (uint i = LANE; i < TURNED; i += WG) {
        vec2 pair = rotated_pair(row, i, angles);
        squares += dot(pair, pair);
    }
    for (uint i = 2 * TURNED + LANE; i < DIM; i += WG) squares += qkv[row + i] * qkv[row + i];
    root = sqrt(group_sum_max(squares, 0.0).x / float(DIM) + eps);
}
#else
float normed(float value, uint d, int head) { return value; }

void find_root(uint row, uint angles) {}
#endif

// Dimension d of a head of k, rotated where it belongs to a pair.
float rotated(uint row, uint d, uint angles) {
    if (d >= 2 * TURNED) return qkv[row + d];
    uint pair = NEOX != 0 ? d % TURNED : d / 2;
    vec2 both = rotated_pair(row, pair, angles);
    return d == (NEOX != 0 ? pair : 2 * pair) ? both.x : both.y;
}

void rotate_or_store(uint row, uint place, int head, uint angles) {
    if (head >= heads + kv_heads) {
        for (uint i = 2 * LANE; i < DIM; i += 2 * WG) store_value(place, i, qkv[row + i], qkv[row + i + 1]);
    } else if (head >= heads) {
        for (uint i = 2 * LANE; i < DIM; i += 2 * WG)
            store_key(place, i, normed(rotated(row, i, angles), i, head), normed(rotated(row, i + 1, angles), i + 1, head));
    } else {
        for (uint i = LANE; i < TURNED; i += WG) {
            uint first = NEOX != 0 ? i : 2 * i;
            vec2 pair = rotated_pair(row, i, angles);
            qkv[row + first] = normed(pair.x, first, head);
            qkv[row + first + APART] = normed(pair.y, first + APART, head);
        }
#if NORMS_LAST
        for (uint i = 2 * TURNED + LANE; i < DIM; i += WG) qkv[row + i] = normed(qkv[row + i], i, head);
#endif
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
    find_root(row, position * TURNED);
    rotate_or_store(row, place, head, position * TURNED);
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
