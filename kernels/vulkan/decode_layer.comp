// requires: SUBGROUPS DOT
// A layer of a step of one token in one dispatch: its products are shorter than a dispatch and a barrier.
//
// GROUPS work-groups, all of which must run at once, go through five phases: the products q, k and v; attention, with the rotation
// and the cache's new entry; the product o; gates and ups; down. Each group computes norms and quantisation for itself. Between
// phases all groups wait for one another, and each requests its codes for the next phase first.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int GROUP = 1;    // at most 8
layout(constant_id = 5) const int PART = 64;    // of positions: a multiple of CHUNK
layout(constant_id = 6) const int MAX_PARTS = 1;     // parts of the longest sequence that the dispatch serves
layout(constant_id = 7) const int NEOX = 1;
layout(constant_id = 8) const int RUNS = 8;     // adjacent positions that a work-group has loads for
layout(constant_id = 9) const int CHUNK = 32;
layout(constant_id = 10) const int WIDTH = 128;
layout(constant_id = 11) const int FFN = 128;
layout(constant_id = 12) const int KV_HEADS = 1;
layout(constant_id = 13) const int RELU2 = 0;
layout(constant_id = 14) const int GROUPS = 1;
layout(constant_id = 15) const int LANES = 8;   // invocations that share a row of all products but the last, and of the last
layout(constant_id = 16) const int DOWN_LANES = 8;
layout(constant_id = 17) const int NORMS = 15;  // a bit for each product: whether there is a norm before it
layout(constant_id = 18) const int X_SPACE = 8; // of ternary_row.glsl
BUFFER(0, readonly, int, step_data);
BUFFER(1, coherent, vec4, x);
BUFFER(2, coherent, vec4, qkv);
BUFFER(3, , uvec4, keys);
BUFFER(4, , uvec4, values);
BUFFER(5, readonly, float, cosines);
BUFFER(6, readonly, float, sines);
BUFFER(7, coherent, vec4, parts);  // for each part and key/value head: GROUP * DIM sums, and each head's greatest score and sum of weights
BUFFER(8, coherent, vec4, activated);
BUFFER(9, volatile, uint, counts);  // counts of groups that wait or have waited, one between two phases; all but the last begin at 0
BUFFER(10, readonly, vec4, norm0);
BUFFER(11, readonly, uvec4, codes0);
BUFFER(12, readonly, float, scale0);
BUFFER(13, readonly, vec4, norm1);
BUFFER(14, readonly, uvec4, codes1);
BUFFER(15, readonly, float, scale1);
BUFFER(16, readonly, vec4, norm2);
BUFFER(17, readonly, uvec4, codes2);
BUFFER(18, readonly, float, scale2);
BUFFER(19, readonly, vec4, norm3);
BUFFER(20, readonly, uvec4, codes3);
BUFFER(21, readonly, float, scale3);
layout(push_constant) uniform Push { int seq_len, block_table, max_blocks; float eps0, eps1, eps2, eps3; };
const int ROPE = 1, kv_heads = KV_HEADS;
#define KV_I8 0  // a layer of one launch takes no int8 cache
#define NORMS_HEADS 0
#include "attention_lanes.glsl"
#include "ternary_row.glsl"
const uint ATTENTION = KV_HEADS * GROUP * DIM, QKV = ATTENTION + 2 * KV_HEADS * DIM;
const uint HEADS_OF_ALL = KV_HEADS * GROUP, ITEM = (GROUP * (DIM + 2) + 3) / 4;
// For each part and head: its greatest score and sum of weights; then the weight of its sums in the head's result.
shared vec2 found_in[MAX_PARTS * HEADS_OF_ALL];
shared float share[MAX_PARTS * HEADS_OF_ALL];

// Waits until every group is here, and sees what all of them wrote before.
void wait_for_all(uint at) {
    memoryBarrierBuffer();
    barrier();
    if (gl_LocalInvocationID.x == 0) {
        atomicAdd(counts[at], 1);
        while (counts[at] < GROUPS) {}
    }
    barrier();
    memoryBarrierBuffer();
}

#define CHUNKS_OF(cols) (((cols) + 127) / 128 * 2)
#define PITCH_OF(cols) (CHUNKS_OF(cols) + (2 - CHUNKS_OF(cols) % 8 + 8) % 8)
#define ROWS_AT_ONCE(lanes) (WG / (lanes))
// Requests this invocation's part of the codes of row `base` and those after it, and of `outs` rows further where `two`.
#define FETCH_CODES(i, codes, base, outs, cols, lanes, two) if (i * (lanes) < CHUNKS_OF(cols)) { \
        uint row = min((base) + lane / (lanes), (outs) - 1) * CHUNKS_OF(cols); \
        uint chunk = min(lane % (lanes) + i * (lanes), CHUNKS_OF(cols) - 1); \
        first[i] = codes[row + chunk]; \
        if (two) second[i] = codes[row + (outs) * CHUNKS_OF(cols) + chunk]; \
    }
#define FETCH_ROW(i, to, from, cols) if (i * WG < (cols) / 4) to[i] = lane + i * WG < (cols) / 4 ? from[lane + i * WG] : vec4(0.0);

ivec2 multiply(uint lane, uint cols, uint lanes, bool two) {
    Sums sums = NONE;
#define MULTIPLY(i) if (i * lanes < CHUNKS_OF(cols)) \
        sums = products(first[i], second[i], lane % lanes + i * lanes, sums, CHUNKS_OF(cols), PITCH_OF(cols), two);
    REPEAT_8(MULTIPLY)
    return sums_of_lanes(sums, lane, lanes, two);
}

// The product of the quantised row; the codes of the first rows have been loaded. One invocation of each row calls STORE(n, sums).
#define PRODUCT(fetch, outs, cols, lanes, two, STORE) \
    for (uint base = id * ROWS_AT_ONCE(lanes); base < (outs); base += GROUPS * ROWS_AT_ONCE(lanes)) { \
        if (base != id * ROWS_AT_ONCE(lanes)) { \
            REPEAT_8(fetch) \
        } \
        ivec2 sums = multiply(lane, cols, lanes, two); \
        uint n = base + lane / (lanes); \
        if (lane % (lanes) == 0 && n < (outs)) STORE(n, sums) \
    }

KERNEL(decode_layer) {
    uint lane = LANE, id = gl_WorkGroupID.x, base = id * ROWS_AT_ONCE(LANES);
    if (id == 0 && lane == 0) counts[3] = 0;  // no group is there yet, nor of the layer before any more
    // A step of one token has one sequence. Cache entries of earlier steps can be requested at once.
    int length = step_data[seq_len], begin = int(id) / KV_HEADS * PART;
    Place at = Place(0, block_table, length - 1, int(id) % KV_HEADS, int(lane));
    find_blocks(at, begin);
#define FETCH_X(i) FETCH_ROW(i, v, x, WIDTH)
#define FETCH_NORM0(i) FETCH_ROW(i, gain, norm0, WIDTH)
#define FETCH0(i) FETCH_CODES(i, codes0, base, QKV, WIDTH, LANES, false)
    REPEAT_8(FETCH_NORM0)
    REPEAT_8(FETCH0)
    REPEAT_8(FETCH_X)
    float unit = quantise(lane, WIDTH / 4, CHUNKS_OF(WIDTH), PITCH_OF(WIDTH), (NORMS & 1) != 0, eps0);
    uint count = (length + PART - 1) / PART, tasks = count * KV_HEADS;
    if (id < tasks) fetch_cached(at, begin, min(length, begin + PART));
#define STORE_QKV(n, sums) qkv[n / 4][n % 4] = scaled(sums.x, unit, scale0[n]);
    PRODUCT(FETCH0, QKV, WIDTH, LANES, false, STORE_QKV)

#define FETCH1(i) FETCH_CODES(i, codes1, base, WIDTH, ATTENTION, LANES, false)
#define FETCH_NORM1(i) FETCH_ROW(i, gain, norm1, ATTENTION)
    REPEAT_8(FETCH1)
    REPEAT_8(FETCH_NORM1)
    wait_for_all(0);

    for (uint task = id; task < tasks; task += GROUPS) {
        begin = int(task) / KV_HEADS * PART;
        at.kv_head = int(task) % KV_HEADS;
        if (task != id) {
            barrier();
            find_blocks(at, begin);
            fetch_cached(at, begin, min(length, begin + PART));
        }
        attend(at, begin, min(length, begin + PART));
        uint to = (task / KV_HEADS * KV_HEADS + at.kv_head) * ITEM;
        for (uint i = lane; i < GROUP * QUADS; i += WG) parts[to + i] = sum_of_runs(i);
        if (lane < GROUP) {
            uint i = GROUP * DIM + 2 * lane;
            parts[to + i / 4][i % 4] = greatest_of(lane);
            parts[to + i / 4][i % 4 + 1] = total_of(lane);
        }
    }
    wait_for_all(1);

    for (uint i = lane; i < count * HEADS_OF_ALL; i += WG) {
        uint p = i / HEADS_OF_ALL, head = i % HEADS_OF_ALL, j = GROUP * DIM + 2 * (head % GROUP);
        vec4 pair = parts[(p * KV_HEADS + head / GROUP) * ITEM + j / 4];
        found_in[i] = j % 4 == 0 ? pair.xy : pair.zw;
    }
#define FETCH_PARTS(i) if (i * WG < ATTENTION / 4) { \
        uint k = min(lane + i * WG, ATTENTION / 4 - 1), head = k / (DIM / 4); \
        [[unroll]] for (uint p = 0; p < MAX_PARTS; p++) \
            found[i][p] = parts[(min(p, count - 1) * KV_HEADS + head / GROUP) * ITEM + k % (GROUP * DIM / 4)]; \
    }
#define MERGE(i) if (i * WG < ATTENTION / 4) { \
        uint head = min(lane + i * WG, ATTENTION / 4 - 1) / (DIM / 4); \
        v[i] = vec4(0.0); \
        [[unroll]] for (uint p = 0; p < MAX_PARTS; p++) v[i] += found[i][p] * share[p * HEADS_OF_ALL + head]; \
        if (lane + i * WG >= ATTENTION / 4) v[i] = vec4(0.0); \
    }
    vec4 found[8][MAX_PARTS];
    REPEAT_8(FETCH_PARTS)
    barrier();
    for (uint i = lane; i < MAX_PARTS * HEADS_OF_ALL; i += WG) {
        uint head = i % HEADS_OF_ALL;
        float top = -INFINITY, total = 0.0;
        for (uint p = 0; p < count; p++) top = max(top, found_in[p * HEADS_OF_ALL + head].x);
        for (uint p = 0; p < count; p++) {
            vec2 part = found_in[p * HEADS_OF_ALL + head];
            total += part.y * exp(part.x - top);
        }
        share[i] = i / HEADS_OF_ALL < count ? exp(found_in[i].x - top) / total : 0.0;
    }
    barrier();
    REPEAT_8(MERGE)
    unit = quantise(lane, ATTENTION / 4, CHUNKS_OF(ATTENTION), PITCH_OF(ATTENTION), (NORMS & 2) != 0, eps1);
#define ADD_O(n, sums) x[n / 4][n % 4] = plus(x[n / 4][n % 4], scaled(sums.x, unit, scale1[n]));
    PRODUCT(FETCH1, WIDTH, ATTENTION, LANES, false, ADD_O)
#define FETCH2(i) FETCH_CODES(i, codes2, base, FFN, WIDTH, LANES, true)
#define FETCH_NORM2(i) FETCH_ROW(i, gain, norm2, WIDTH)
    REPEAT_8(FETCH2)
    REPEAT_8(FETCH_NORM2)
    wait_for_all(2);

    REPEAT_8(FETCH_X)
    unit = quantise(lane, WIDTH / 4, CHUNKS_OF(WIDTH), PITCH_OF(WIDTH), (NORMS & 4) != 0, eps2);
#define STORE_ACTIVATED(n, sums) \
    activated[n / 4][n % 4] = act(scaled(sums.x, unit, scale2[n]), RELU2 != 0) * scaled(sums.y, unit, scale2[n + FFN]);
    PRODUCT(FETCH2, FFN, WIDTH, LANES, true, STORE_ACTIVATED)
    base = id * ROWS_AT_ONCE(DOWN_LANES);
#define FETCH3(i) FETCH_CODES(i, codes3, base, WIDTH, FFN, DOWN_LANES, false)
#define FETCH_NORM3(i) FETCH_ROW(i, gain, norm3, FFN)
    REPEAT_8(FETCH3)
    REPEAT_8(FETCH_NORM3)
    wait_for_all(3);

    if (id == 0 && lane < 3) counts[lane] = 0;  // all groups have passed them
#define FETCH_ACTIVATED(i) FETCH_ROW(i, v, activated, FFN)
    REPEAT_8(FETCH_ACTIVATED)
    unit = quantise(lane, FFN / 4, CHUNKS_OF(FFN), PITCH_OF(FFN), (NORMS & 8) != 0, eps3);
#define ADD_DOWN(n, sums) x[n / 4][n % 4] = plus(x[n / 4][n % 4], scaled(sums.x, unit, scale3[n]));
    PRODUCT(FETCH3, WIDTH, FFN, DOWN_LANES, false, ADD_DOWN)
}
