// One key/value head and part of the positions of a token's attention, for all the GROUP query heads that share the keys: of
// attention_decode and decode_layer. An invocation holds up to 8 times 16 bytes of keys and values, which are on their way before q
// is made. Keys go through shared memory, where an invocation takes a whole score; values are summed as they are held.
// ROPE: q is rotated here, and the token's own k (rotated) and v are stored by the part that reads them.
// Named before it: the constants, step_data, qkv, the cache, the tables and kv_heads.
const int QUADS = DIM / 4;
const int WIDE = KV_F16 != 0 ? 8 : 4;  // dimensions in 16 bytes of the cache
const int LOADS = DIM / WIDE, STEP = WIDE / 4;
const int EACH = CHUNK / RUNS;                       // positions of an invocation
const int PAIRS = (GROUP * CHUNK + WG - 1) / WG;     // scores of an invocation
shared vec4 query[GROUP * QUADS];
shared uvec4 pool[POOL];  // keys: LOADS and one more a position, so that positions fall into different banks
shared vec4 score[GROUP * CHUNK / 4];
shared float weight[GROUP * CHUNK];
shared float correction[8];
shared float greatest[GROUP];
shared float totals[GROUP];
shared uvec4 own_value[LOADS];
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
uvec4 held_k[8], held_v[8];

// Where a token's heads begin in qkv, what it attends to, and where this invocation is.
struct Place {
    uint row;
    int table, position, kv_head, lane;
};

#define IS_OWN(i) (ROPE != 0 && start + run + i * RUNS == at.position)

// Asks for CHUNK positions from `start` on, as far as they are in the cache already.
void fetch_cached(Place at, int start, int end) {
    int run = at.lane / LOADS, column = at.lane % LOADS;
#define FETCH_POSITION(i) if (i < EACH) { \
        int p = start + run + i * RUNS; \
        bool there = run < RUNS && p < end && !IS_OWN(i); \
        uint block = step_data[at.table + min(p, end - 1) / BLOCK]; \
        uint from = ((block * BLOCK + p % BLOCK) * kv_heads + at.kv_head) * LOADS + column; \
        held_k[i] = there ? keys[from] : uvec4(0); \
        held_v[i] = there ? values[from] : uvec4(0); \
    }
    REPEAT_8(FETCH_POSITION)
}

// Attends to the positions from `begin` to before `end`, of which the first CHUNK are asked for. Afterwards `greatest` and `totals`
// have the heads' greatest scores and sums of weights, and the runs' sums are in the pool.
void attend(Place at, int begin, int end) {
    int lane = at.lane, run = lane / LOADS, column = lane % LOADS, heads = kv_heads * GROUP;
    uint own_k = at.row + (heads + at.kv_head) * QUADS;
    float unit = 1.0 / sqrt(float(DIM));
    [[unroll]] for (int i = 0; i < 16; i++) sums[i] = vec4(0.0);
    float largest[8];
    [[unroll]] for (int i = 0; i < 8; i++) largest[i] = -INFINITY;
    float total = 0.0;  // of head `lane`
    for (int start = begin; start < end; start += CHUNK) {
        if (start != begin) fetch_cached(at, start, end);
        if (start == begin) {  // while the loads are on their way
            for (uint i = lane; i < GROUP * QUADS; i += WG) {
                uint from = at.row + (at.kv_head * GROUP + i / QUADS) * QUADS;
                query[i] = (ROPE != 0 ? rotated(from, at.position, i % QUADS) : qkv[from + i % QUADS]) * unit;
            }
        }
        if (ROPE != 0 && at.position - start < CHUNK && at.position < end && lane < LOADS) {
            int position = at.position;
            uint block = step_data[at.table + position / BLOCK], v = own_k + kv_heads * QUADS;
            uint to = ((block * BLOCK + position % BLOCK) * kv_heads + at.kv_head) * LOADS + lane;
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
}

// What the runs found for head i / DIM and dimension i % DIM.
float sum_of_runs(uint i) {
    float sum = 0.0;
    for (uint r = 0; r < RUNS / 2; r++) sum += uintBitsToFloat(pool[(r * GROUP * DIM + i) / 4][i % 4]);
    return sum;
}
