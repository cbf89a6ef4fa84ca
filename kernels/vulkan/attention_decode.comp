// Attention of one token: a work-group for each key/value head and each PART positions of the sequence, for all the GROUP query
// heads that share the keys. What the parts found is merged by the one of them that ends last.
// An invocation holds up to 8 times 16 bytes of keys and values, which are on their way before q is made. Keys go through shared
// memory, where an invocation takes a whole score; values are summed as they are held.
// ROPE: q is rotated here, and the token's own k (rotated) and v are stored by the part that reads them.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int GROUP = 1;    // at most 8
layout(constant_id = 5) const int PART = 64;    // a multiple of CHUNK
layout(constant_id = 6) const int MOST = 1;     // parts of the longest sequence that the launch serves
layout(constant_id = 7) const int ROPE = 0;
layout(constant_id = 8) const int NEOX = 1;
layout(constant_id = 9) const int RUNS = 8;     // of positions side by side: a power of two, from CHUNK / 8 to CHUNK
layout(constant_id = 10) const int CHUNK = 32;  // positions that are looked at together
layout(constant_id = 11) const int POOL = 64;   // what is needed of keys and, later, of the runs' sums
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
BUFFER(2, , uvec4, keys);
BUFFER(3, , uvec4, values);
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
BUFFER(6, writeonly, float, result);
BUFFER(7, coherent, float, parts);  // of each token, key/value head and part: GROUP greatest scores, as many sums of weights, DIM sums each
BUFFER(8, coherent, uint, arrivals);
layout(push_constant) uniform Push { int token_seq, seq_begin, seq_len, block_table, max_blocks, kv_heads; };
const int QUADS = DIM / 4;
const int WIDE = KV_F16 != 0 ? 8 : 4;  // dimensions in 16 bytes of the cache
const int LOADS = DIM / WIDE, STEP = WIDE / 4;
const int EACH = CHUNK / RUNS;                       // positions of an invocation
const int PAIRS = (GROUP * CHUNK + WG - 1) / WG;     // scores of an invocation
const int ITEM = GROUP * (DIM + 2);
shared vec4 query[GROUP * QUADS];
shared uvec4 pool[POOL];  // keys: LOADS and one more a position, so that positions fall into different banks
shared vec4 score[GROUP * CHUNK / 4];
shared float weight[GROUP * CHUNK];
shared float correction[8];
shared float factors[GROUP * MOST];
shared float greatest[GROUP];
shared float totals[GROUP];
shared uvec4 own_value[LOADS];
shared uint last;
vec4 sums[16];  // of each head, STEP quads

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

// 16 bytes of the cache as WIDE dimensions: the second four are zeros where there are none.
vec4 low_of(uvec4 words) { return KV_F16 != 0 ? halves(words.x, words.y) : uintBitsToFloat(words); }
vec4 high_of(uvec4 words) { return KV_F16 != 0 ? halves(words.z, words.w) : vec4(0.0); }

// Adds a position's value, as the heads weigh it.
void add_value(uvec4 words, uint p) {
    vec4 a = low_of(words), b = high_of(words);
#define ADD_HEAD(h) if (h < GROUP) { \
        float w = weight[h * CHUNK + p]; \
        sums[2 * h] += w * a; \
        if (STEP == 2) sums[2 * h + 1] += w * b; \
    }
    REPEAT_8(ADD_HEAD)
}

KERNEL(attention_decode) {
    int lane = int(gl_LocalInvocationID.x), kv_head = int(gl_WorkGroupID.x), m = int(gl_WorkGroupID.y);
    int part = int(gl_WorkGroupID.z), heads = kv_heads * GROUP;
    if (m >= STEP_TOKENS) return;
    int sequence = step_data[token_seq + m], table = block_table + sequence * max_blocks;
    int position = step_data[seq_len + sequence] - step_data[seq_begin + sequence + 1] + m;
    int length = position + 1, count = (length + PART - 1) / PART;
    if (part >= count) return;
    int run = lane / LOADS, column = lane % LOADS;
    uint row = m * uint(heads + 2 * kv_heads) * QUADS;
    uint own_k = row + (heads + kv_head) * QUADS;
    int end = min(length, (part + 1) * PART);
    float unit = 1.0 / sqrt(float(DIM));
    [[unroll]] for (int i = 0; i < 16; i++) sums[i] = vec4(0.0);
    float largest[8];
    [[unroll]] for (int i = 0; i < 8; i++) largest[i] = -INFINITY;
    float total = 0.0;  // of head `lane`
    for (int start = part * PART; start < end; start += CHUNK) {
        uvec4 held_k[8], held_v[8];
        bool own = ROPE != 0 && position - start < CHUNK;  // whether the token's own position is in this chunk
#define IS_OWN(i) (own && start + run + i * RUNS == position)
#define FETCH(i) if (i < EACH) { \
        int p = start + run + i * RUNS; \
        bool there = run < RUNS && p < end && !IS_OWN(i); \
        uint at = ((step_data[table + min(p, end - 1) / BLOCK] * BLOCK + p % BLOCK) * kv_heads + kv_head) * LOADS + column; \
        held_k[i] = there ? keys[at] : uvec4(0); \
        held_v[i] = there ? values[at] : uvec4(0); \
    }
        REPEAT_8(FETCH)
        if (start == part * PART) {  // while the loads are on their way
            for (uint i = lane; i < GROUP * QUADS; i += WG) {
                uint from = row + (kv_head * GROUP + i / QUADS) * QUADS;
                query[i] = (ROPE != 0 ? rotated(from, position, i % QUADS) : qkv[from + i % QUADS]) * unit;
            }
        }
        if (own && lane < LOADS) {
            uint block = step_data[table + position / BLOCK], v = own_k + kv_heads * QUADS;
            uint to = ((block * BLOCK + position % BLOCK) * kv_heads + kv_head) * LOADS + lane;
            uvec4 key, value;
            if (KV_F16 != 0) {
                key = packed(rotated(own_k, position, 2 * lane), rotated(own_k, position, 2 * lane + 1));
                value = packed(qkv[v + 2 * lane], qkv[v + 2 * lane + 1]);
            } else {
                key = floatBitsToUint(rotated(own_k, position, lane));
                value = floatBitsToUint(qkv[v + lane]);
            }
            pool[(position - start) * (LOADS + 1) + lane] = keys[to] = key;
            own_value[lane] = values[to] = value;
        }
#define SHARE(i) if (i < EACH && run < RUNS && !IS_OWN(i)) pool[(run + i * RUNS) * (LOADS + 1) + column] = held_k[i];
        REPEAT_8(SHARE)
        barrier();
        int here = min(CHUNK, end - start);
        float found[8];
#define SCORE(j) if (j < PAIRS) { \
        int p = (lane + j * WG) % CHUNK, h = (lane + j * WG) / CHUNK; \
        float dots = 0.0; \
        if (h < GROUP) { \
            for (int i = 0; i < LOADS; i++) { \
                uvec4 words = pool[p * (LOADS + 1) + i]; \
                dots += dot(low_of(words), query[h * QUADS + i * STEP]); \
                if (STEP == 2) dots += dot(high_of(words), query[h * QUADS + i * STEP + 1]); \
            } \
            found[j] = p < here ? dots : -INFINITY; \
            score[h * (CHUNK / 4) + p / 4][p % 4] = found[j]; \
        } \
    }
        REPEAT_8(SCORE)
        barrier();
#define WEIGH(j) if (j < PAIRS) { \
        int p = (lane + j * WG) % CHUNK, h = (lane + j * WG) / CHUNK; \
        if (h < GROUP) { \
            float before = largest[j]; \
            for (int i = 0; i < CHUNK / 4; i++) { \
                vec4 s = score[h * (CHUNK / 4) + i]; \
                largest[j] = max(largest[j], max(max(s.x, s.y), max(s.z, s.w))); \
            } \
            weight[h * CHUNK + p] = exp(found[j] - largest[j]); \
            if (p == 0) { \
                correction[h] = exp(before - largest[j]); \
                greatest[h] = largest[j]; \
            } \
        } \
    }
        REPEAT_8(WEIGH)
        barrier();
        if (lane < GROUP) {
            float sum = 0.0;
            for (int i = 0; i < CHUNK; i++) sum += weight[lane * CHUNK + i];
            total = total * correction[lane] + sum;
        }
#define CORRECT(h) if (h < GROUP) { sums[2 * h] *= correction[h]; sums[2 * h + 1] *= correction[h]; }
        REPEAT_8(CORRECT)
#define VALUE(i) if (i < EACH && run < RUNS) \
        add_value(IS_OWN(i) ? own_value[column] : held_v[i], run + i * RUNS);
        REPEAT_8(VALUE)
    }
    if (lane < GROUP) totals[lane] = total;
    // Fold the runs: the upper half gives its sums to the lower half, whose are then added up one by one.
#define SLOT(h, j) ((run % (RUNS / 2) * GROUP + h) * QUADS + column * STEP + j)
#define GIVE(h) if (h < GROUP) { \
        pool[SLOT(h, 0)] = floatBitsToUint(sums[2 * h]); \
        if (STEP == 2) pool[SLOT(h, 1)] = floatBitsToUint(sums[2 * h + 1]); \
    }
#define TAKE(h) if (h < GROUP) { \
        sums[2 * h] += uintBitsToFloat(pool[SLOT(h, 0)]); \
        if (STEP == 2) sums[2 * h + 1] += uintBitsToFloat(pool[SLOT(h, 1)]); \
    }
    if (run >= RUNS / 2 && run < RUNS) {
        REPEAT_8(GIVE)
    }
    barrier();
    if (run < RUNS / 2) {
        REPEAT_8(TAKE)
        REPEAT_8(GIVE)
    }
    barrier();
    uint first_head = m * uint(heads) + kv_head * GROUP;
    uint from = (m * kv_heads + kv_head) * uint(MOST * ITEM), mine = from + part * ITEM;
    for (uint i = lane; i < GROUP * DIM; i += WG) {
        float sum = 0.0;
        for (uint r = 0; r < RUNS / 2; r++) sum += uintBitsToFloat(pool[(r * GROUP * DIM + i) / 4][i % 4]);
        if (count == 1) result[first_head * DIM + i] = sum / totals[i / DIM];
        else parts[mine + 2 * GROUP + i] = sum;
    }
    if (count == 1) return;
    if (lane < GROUP) {
        parts[mine + lane] = greatest[lane];
        parts[mine + GROUP + lane] = total;
    }
    memoryBarrierBuffer();
    barrier();
    if (lane == 0) last = atomicAdd(arrivals[m * kv_heads + kv_head], 1);
    barrier();
    if (last != count - 1) return;
    memoryBarrierBuffer();
    for (uint i = lane; i < GROUP * count; i += WG) factors[i / count * MOST + i % count] = parts[from + i % count * ITEM + i / count];
    barrier();
    if (lane < GROUP) {
        float most = -INFINITY, sum = 0.0;
        for (uint p = 0; p < count; p++) most = max(most, factors[lane * MOST + p]);
        for (uint p = 0; p < count; p++) {
            float factor = exp(factors[lane * MOST + p] - most);
            factors[lane * MOST + p] = factor;
            sum += factor * parts[from + p * ITEM + GROUP + lane];
        }
        totals[lane] = sum;
    }
    barrier();
    for (uint i = lane; i < GROUP * DIM; i += WG) {
        float sum = 0.0;
        [[unroll]] for (uint p = 0; p < MOST; p++)
            if (p < count) sum += factors[i / DIM * MOST + p] * parts[from + p * ITEM + 2 * GROUP + i];
        result[first_head * DIM + i] = sum / totals[i / DIM];
    }
    if (lane == 0) arrivals[m * kv_heads + kv_head] = 0;
}
