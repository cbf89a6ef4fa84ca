// The common beginning of a part of a token's attention: an invocation holds up to 8 times 16 bytes of keys and
// values, which are in flight before q is computed. Declared before it: the constants, step_data, qkv, the cache, the tables, kv_heads, max_blocks.
// ROPE: q is rotated here, and the token's own k (rotated) and v are stored by the part that reads them.
// KV_I8: 8 codes and their scale are held in those 16 bytes.
// PARTIAL: TURNED pairs of a head are rotated, else all.
// NORMS_HEADS: q and k are normalised before they are rotated, with q_norm, k_norm and head_eps.
#include "cache.glsl"
const int QUADS = DIM / 4;
const int WIDE = KV_F16 + KV_I8 != 0 ? 8 : 4;  // dimensions in the 16 bytes
const int LOADS = DIM / WIDE, STEP = WIDE / 4;
const int EACH = CHUNK / RUNS;         // positions of an invocation
shared vec4 query[GROUP * QUADS];
shared uvec4 own_key[LOADS];
shared uvec4 own_value[LOADS];

vec4 halves(uint a, uint b) { return vec4(unpackHalf2x16(a), unpackHalf2x16(b)); }

#if NORMS_HEADS
shared float head_root[GROUP + 1];  // 1 / sqrt(mean of squares + eps) of each head of q, and of the token's k
float gain_at(uint d, uint head) { return head_root[head] * (head < GROUP ? q_norm[d] : k_norm[d]); }
#else
float gain_at(uint d, uint head) { return 1.0; }
#endif

// Dimensions 4 i to 4 i + 3 of a head of qkv, from `from` on: one of q of the group, or k after them.
vec4 rotated(uint from, uint position, uint i, uint head) {
    vec4 v = qkv[from + i] * vec4(gain_at(4 * i, head), gain_at(4 * i + 1, head), gain_at(4 * i + 2, head), gain_at(4 * i + 3, head));
#if PARTIAL
    if (NEOX != 0) {
        vec4 pair;
        [[unroll]] for (uint j = 0; j < 4; j++) {
            uint d = 4 * i + j, other = d < TURNED ? d + TURNED : d - TURNED;
            uint angle = position * TURNED + min(d, other);
            float sign = d < TURNED ? -1.0 : 1.0;
            pair[j] = v[j];
            if (d < 2 * TURNED) pair[j] = v[j] * cosines[angle] + sign * qkv[from + other / 4][other % 4] * gain_at(other, head) * sines[angle];
        }
        return pair;
    }
    [[unroll]] for (uint j = 0; j < 4; j += 2) {
        uint pair = 2 * i + j / 2, angle = position * TURNED + pair;
        vec2 both = vec2(v[j], v[j + 1]);
        if (pair < TURNED) {
            v[j] = both.x * cosines[angle] - both.y * sines[angle];
            v[j + 1] = both.y * cosines[angle] + both.x * sines[angle];
        }
    }
    return v;
#else
    if (NEOX != 0) {
        bool low = i < QUADS / 2;
        vec4 pair;
        [[unroll]] for (uint j = 0; j < 4; j++) {
            uint d = 4 * i + j, other = 4 * i + j < DIM / 2 ? d + DIM / 2 : d - DIM / 2;
            uint angle = position * (DIM / 2) + min(d, other);
            float sign = d < DIM / 2 ? -1.0 : 1.0;
            pair[j] = v[j] * cosines[angle] + sign * qkv[from + other / 4][other % 4] * gain_at(other, head) * sines[angle];
        }
        return pair;
    }
    uint angle = position * (DIM / 2) + 2 * i;
    vec2 c = vec2(cosines[angle], cosines[angle + 1]), s = vec2(sines[angle], sines[angle + 1]);
    return vec4(v.x * c.x - v.y * s.x, v.y * c.x + v.x * s.x, v.z * c.y - v.w * s.y, v.w * c.y + v.z * s.y);
#endif
}

uvec4 packed(vec4 a, vec4 b) {
    return uvec4(half_pair(a.x, a.y), half_pair(a.z, a.w), half_pair(b.x, b.y), half_pair(b.z, b.w));
}

#if KV_I8
#define AT uvec2
#define PLACE(block, p, kv_head, column) row_of(block, p, kv_head, kv_heads)
#define LOAD(cache, at, column) uvec4(cache[at.x + 2 * column], cache[at.x + 2 * column + 1], cache[at.y], 0)
vec4 low_of(uvec4 words) { return coded(words.x) * uintBitsToFloat(words.z); }
vec4 high_of(uvec4 words) { return coded(words.y) * uintBitsToFloat(words.z); }

shared vec4 exact[2 * QUADS];  // the token's own k and v, before they become codes

// Loads `column` of row `which` as the cache has it.
uvec4 row_codes(uint which, uint column) {
    uint greatest = 0;
    for (uint i = 0; i < QUADS; i++) greatest = max(greatest, magnitude_bits(exact[which * QUADS + i]));
    vec2 unit = row_unit(greatest);
    uint quad = which * QUADS + 2 * column;
    return uvec4(quantised(exact[quad] * unit.x), quantised(exact[quad + 1] * unit.x), floatBitsToUint(unit.y), 0);
}
#else
#define AT uint
#define PLACE(block, p, kv_head, column) ((block * BLOCK + p % BLOCK) * kv_heads + kv_head) * LOADS + column
#define LOAD(cache, at, column) cache[at]
// The 16 bytes as WIDE dimensions: the second four are zeros where there are none.
vec4 low_of(uvec4 words) { return KV_F16 != 0 ? halves(words.x, words.y) : uintBitsToFloat(words); }
vec4 high_of(uvec4 words) { return KV_F16 != 0 ? halves(words.z, words.w) : vec4(0.0); }
#endif

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
        AT from = there ? PLACE(blocks[i], p, at.kv_head, column) : AT(0); \
        held_k[i] = there ? LOAD(keys, from, column) : uvec4(0); \
        held_v[i] = there ? LOAD(values, from, column) : uvec4(0); \
    }
    REPEAT_8(FETCH_POSITION)
}

// Puts the heads' q, and the token's own key and value where the part has its position, into shared memory.
void share_token(Place at, int begin, int end) {
    int lane = at.lane, heads = kv_heads * GROUP;
    float unit = 1.0 / sqrt(float(DIM));
#if NORMS_HEADS
#if SUBGROUPS
    for (uint h = lane / SUBGROUP; h <= GROUP; h += SUBS) {
        uint apart = SUBGROUP, part = lane % SUBGROUP;
#else
    for (uint h = lane; h <= GROUP; h += WG) {
        uint apart = 1, part = 0;
#endif
        uint from = at.row + (h < GROUP ? at.kv_head * GROUP + h : heads + at.kv_head) * QUADS;
        float squares = 0.0;
        for (uint i = part; i < QUADS; i += apart) squares += dot(qkv[from + i], qkv[from + i]);
#if SUBGROUPS
        squares = subgroupAdd(squares);
#endif
        if (part == 0) head_root[h] = 1.0 / sqrt(squares / float(DIM) + head_eps);
    }
    barrier();
#endif
    for (uint i = lane; i < GROUP * QUADS; i += WG) {
        uint from = at.row + (at.kv_head * GROUP + i / QUADS) * QUADS;
        query[i] = (ROPE != 0 ? rotated(from, at.position, i % QUADS, i / QUADS) : qkv[from + i % QUADS]) * unit;
    }
#if KV_I8
    if (ROPE != 0 && at.position >= begin && at.position < end) {  // the same for the whole work-group
        uint k = at.row + (heads + at.kv_head) * QUADS, v = k + kv_heads * QUADS;
        for (uint i = lane; i < QUADS; i += WG) {
            exact[i] = rotated(k, at.position, i, GROUP);
            exact[QUADS + i] = qkv[v + i];
        }
        barrier();
        if (lane < LOADS) {
            uvec2 to = row_of(step_data[at.table + at.position / BLOCK], at.position, at.kv_head, kv_heads);
            uvec4 key = row_codes(0, lane), value = row_codes(1, lane);
            own_key[lane] = key;
            own_value[lane] = value;
            keys[to.x + 2 * lane] = key.x;
            keys[to.x + 2 * lane + 1] = key.y;
            values[to.x + 2 * lane] = value.x;
            values[to.x + 2 * lane + 1] = value.y;
            if (lane == 0) {
                keys[to.y] = key.z;
                values[to.y] = value.z;
            }
        }
    }
#else
    if (ROPE != 0 && at.position >= begin && at.position < end && lane < LOADS) {
        uint k = at.row + (heads + at.kv_head) * QUADS, v = k + kv_heads * QUADS;
        uint block = step_data[at.table + at.position / BLOCK];
        uint to = ((block * BLOCK + at.position % BLOCK) * kv_heads + at.kv_head) * LOADS + lane;
        uvec4 key, value;
        if (KV_F16 != 0) {
            key = packed(rotated(k, at.position, 2 * lane, GROUP), rotated(k, at.position, 2 * lane + 1, GROUP));
            value = packed(qkv[v + 2 * lane], qkv[v + 2 * lane + 1]);
        } else {
            key = floatBitsToUint(rotated(k, at.position, lane, GROUP));
            value = floatBitsToUint(qkv[v + lane]);
        }
        own_key[lane] = keys[to] = key;
        own_value[lane] = values[to] = value;
    }
#endif
}
