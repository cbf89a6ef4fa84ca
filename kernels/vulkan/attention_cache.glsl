// The common beginning of a part of a token's attention: an invocation holds up to 8 times 16 bytes of keys and
// values, which are in flight before q is computed. Declared before it: the constants, step_data, qkv, the cache, the tables, kv_heads, max_blocks.
// ROPE: q is rotated here, and the token's own k (rotated) and v are stored by the part that reads them.
const int QUADS = DIM / 4;
const int WIDE = KV_F16 != 0 || KV_I8 != 0 ? 8 : 4;  // dimensions of a load
#include "cache_loads.glsl"
const int LOADS = DIM / WIDE, STEP = WIDE / 4;
const int EACH = CHUNK / RUNS;         // positions of an invocation
shared vec4 query[GROUP * QUADS];
shared uvec4 own_key[LOADS];
shared uvec4 own_value[LOADS];
shared vec4 own_exact[KV_I8 != 0 ? 2 * QUADS : 1];  // before they become codes

vec4 halves(uint a, uint b) { return vec4(unpackHalf2x16(a), unpackHalf2x16(b)); }

vec4 rotated(uint from, uint position, uint i) {  // dimensions 4 i to 4 i + 3 of a head of qkv
    vec4 v = qkv[from + i];
    if (NEOX != 0) {
        bool low = i < QUADS / 2;
        vec4 pair;
        [[unroll]] for (uint j = 0; j < 4; j++) {
            uint d = 4 * i + j, other = 4 * i + j < DIM / 2 ? d + DIM / 2 : d - DIM / 2;
            uint angle = position * (DIM / 2) + min(d, other);
            float sign = d < DIM / 2 ? -1.0 : 1.0;
            pair[j] = v[j] * cosines[angle] + sign * qkv[from + other / 4][other % 4] * sines[angle];
        }
        return pair;
    }
    uint angle = position * (DIM / 2) + 2 * i;
    vec2 c = vec2(cosines[angle], cosines[angle + 1]), s = vec2(sines[angle], sines[angle + 1]);
    return vec4(v.x * c.x - v.y * s.x, v.y * c.x + v.x * s.x, v.z * c.y - v.w * s.y, v.w * c.y + v.z * s.y);
}

uvec4 packed(vec4 a, vec4 b) {
    return uvec4(half_pair(a.x, a.y), half_pair(a.z, a.w), half_pair(b.x, b.y), half_pair(b.z, b.w));
}

// A load as WIDE dimensions: the second four are zeros where there are none.
vec4 low_of(uvec4 words) {
    if (KV_I8 != 0) return codes_of(words.x, uintBitsToFloat(words.z));
    return KV_F16 != 0 ? halves(words.x, words.y) : uintBitsToFloat(words);
}
vec4 high_of(uvec4 words) {
    if (KV_I8 != 0) return codes_of(words.y, uintBitsToFloat(words.z));
    return KV_F16 != 0 ? halves(words.z, words.w) : vec4(0.0);
}

uvec4 held_k[8], held_v[8];
uint blocks[8];

// Where a token's heads begin in qkv, what it attends to, and where this invocation is.
struct Place {
    uint row;
    int table, position, kv_head, lane;
};

#define IS_OWN(i) (ROPE != 0 && start + run + i * RUNS == at.position)

// Finds the blocks of the CHUNK positions from `start` on. Table entries past a sequence's end are not used.
void find_blocks(Place at, int start) {
    int run = at.lane / LOADS;
#define FIND_BLOCK(i) if (i < EACH) blocks[i] = step_data[at.table + min((start + run + i * RUNS) / BLOCK, max_blocks - 1)];
    REPEAT_8(FIND_BLOCK)
}

// Requests those that are in the cache already.
void fetch_cached(Place at, int start, int end) {
    int run = at.lane / LOADS, column = at.lane % LOADS;
#define FETCH_POSITION(i) if (i < EACH) { \
        int p = start + run + i * RUNS; \
        bool there = run < RUNS && p < end && !IS_OWN(i); \
        uint block = there ? blocks[i] : 0, row = there ? p % BLOCK * kv_heads + at.kv_head : 0, load = there ? column : 0; \
        held_k[i] = there ? key_load(block, row, load) : uvec4(0); \
        held_v[i] = there ? value_load(block, row, load) : uvec4(0); \
    }
    REPEAT_8(FETCH_POSITION)
}

// The token's own key and value as codes, into shared memory and the cache. The whole work-group calls it.
void share_codes(Place at) {
    for (uint i = at.lane; i < 2 * QUADS; i += WG) {
        uint k = at.row + (kv_heads * GROUP + at.kv_head) * QUADS, v = k + kv_heads * QUADS;
        own_exact[i] = i < QUADS ? rotated(k, at.position, i) : qkv[v + i - QUADS];
    }
    barrier();
    for (uint i = at.lane; i < 2 * LOADS; i += WG) {
        uint which = i / LOADS, column = i % LOADS, greatest = 0;
        for (uint j = 0; j < QUADS; j++) greatest = max(greatest, magnitude_bits(own_exact[which * QUADS + j]));
        vec2 unit = row_unit(greatest);
        uint low = quantised(own_exact[which * QUADS + 2 * column] * unit.x);
        uint high = quantised(own_exact[which * QUADS + 2 * column + 1] * unit.x), scale = floatBitsToUint(unit.y);
        uint block = step_data[at.table + at.position / BLOCK], row = at.position % BLOCK * kv_heads + at.kv_head;
        uint word = block * BLOCK_WORDS + row * QUADS + 2 * column, after = block * BLOCK_WORDS + BLOCK_CODES + row;
        if (which == 0) {
            own_key[column] = uvec4(low, high, scale, 0);
            keys[word / 4][word % 4] = low;
            keys[word / 4][word % 4 + 1] = high;
            if (column == 0) keys[after / 4][after % 4] = scale;
        } else {
            own_value[column] = uvec4(low, high, scale, 0);
            values[word / 4][word % 4] = low;
            values[word / 4][word % 4 + 1] = high;
            if (column == 0) values[after / 4][after % 4] = scale;
        }
    }
}

// Puts the heads' q, and the token's own key and value where the part has its position, into shared memory.
void share_token(Place at, int begin, int end) {
    int lane = at.lane, heads = kv_heads * GROUP;
    float unit = 1.0 / sqrt(float(DIM));
    for (uint i = lane; i < GROUP * QUADS; i += WG) {
        uint from = at.row + (at.kv_head * GROUP + i / QUADS) * QUADS;
        query[i] = (ROPE != 0 ? rotated(from, at.position, i % QUADS) : qkv[from + i % QUADS]) * unit;
    }
    bool has_own = ROPE != 0 && at.position >= begin && at.position < end;
    if (KV_I8 != 0 && has_own) {
        share_codes(at);
        return;
    }
    if (has_own && lane < LOADS) {
        uint k = at.row + (heads + at.kv_head) * QUADS, v = k + kv_heads * QUADS;
        uint block = step_data[at.table + at.position / BLOCK];
        uint to = ((block * BLOCK + at.position % BLOCK) * kv_heads + at.kv_head) * LOADS + lane;
        uvec4 key, value;
        if (KV_F16 != 0) {
            key = packed(rotated(k, at.position, 2 * lane), rotated(k, at.position, 2 * lane + 1));
            value = packed(qkv[v + 2 * lane], qkv[v + 2 * lane + 1]);
        } else {
            key = floatBitsToUint(rotated(k, at.position, lane));
            value = floatBitsToUint(qkv[v + lane]);
        }
        own_key[lane] = keys[to] = key;
        own_value[lane] = values[to] = value;
    }
}
