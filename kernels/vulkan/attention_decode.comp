// variants: SUBGROUPS KV_I8 NORMS_HEADS PARTIAL
// Attention of one token: a work-group for each key/value head and each PART positions of the sequence, for all the GROUP query
// heads that share the keys. The part that ends last merges the results of all.
// SUBGROUPS: the loads of a position are a power of two that divides a subgroup.
layout(constant_id = 1) const int DIM = 64;
layout(constant_id = 2) const int BLOCK = 32;
layout(constant_id = 3) const int KV_F16 = 0;
layout(constant_id = 4) const int GROUP = 1;    // at most 8
layout(constant_id = 5) const int PART = 64;    // a multiple of CHUNK
layout(constant_id = 6) const int MAX_PARTS = 1;     // parts of the longest sequence that the launch serves
layout(constant_id = 7) const int ROPE = 0;
layout(constant_id = 8) const int NEOX = 1;
layout(constant_id = 9) const int RUNS = 8;     // runs of adjacent positions: a power of two, from CHUNK / 8 to CHUNK
layout(constant_id = 10) const int CHUNK = 32;  // positions that are looked at together
layout(constant_id = 12) const int WINDOW = 0;
#if PARTIAL
layout(constant_id = 13) const int TURNED = 0;  // pairs of a head that are rotated
#endif
#if !SUBGROUPS
layout(constant_id = 11) const int POOL = 64;   // keys, and later the runs' sums
#endif
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, qkv);
#if KV_I8
BUFFER(2, , uint, keys);
BUFFER(3, , uint, values);
#else
BUFFER(2, , uvec4, keys);
BUFFER(3, , uvec4, values);
#endif
BUFFER(4, readonly, float, cosines);
BUFFER(5, readonly, float, sines);
BUFFER(6, writeonly, float, result);
BUFFER(7, coherent, float, parts);  // for each token, key/value head and part: GROUP greatest scores, as many sums of weights, DIM sums each
BUFFER(8, coherent, uint, arrivals);
#if NORMS_HEADS
BUFFER(9, readonly, float, q_norm);
BUFFER(10, readonly, float, k_norm);
#endif
layout(push_constant) uniform Push {
    int token_seq, seq_begin, seq_len, block_table, max_blocks, kv_heads;
#if NORMS_HEADS
    float head_eps;
#endif
};
#if SUBGROUPS
#include "attention_lanes.glsl"
#else
#include "attention_part.glsl"
#endif
#include "window.glsl"
const int ITEM = GROUP * (DIM + 2);
shared float factors[GROUP * MAX_PARTS];
shared float all_totals[GROUP];
shared uint last;

KERNEL(attention_decode) {
    int lane = LANE, kv_head = int(gl_WorkGroupID.x), m = int(gl_WorkGroupID.y);
    int part = int(gl_WorkGroupID.z), heads = kv_heads * GROUP;
    if (m >= STEP_TOKENS) return;
    int sequence = step_data[token_seq + m], position = TOKEN_POSITION(m), length = position + 1;
    int seen = WINDOW_BEGIN(length), begin = seen + part * PART;
    int count = (length - seen + PART - 1) / PART, end = min(length, begin + PART);
    if (part >= count) return;
    Place at = Place(m * uint(heads + 2 * kv_heads) * QUADS, block_table + sequence * max_blocks, position, kv_head, lane);
    find_blocks(at, begin);
    fetch_cached(at, begin, end);
    attend(at, begin, end);
    uint first_head = m * uint(heads) + kv_head * GROUP;
    uint from = (m * kv_heads + kv_head) * uint(MAX_PARTS * ITEM), mine = from + part * ITEM;
    for (uint i = lane; i < GROUP * QUADS; i += WG) {
        vec4 sum = sum_of_runs(i);
        if (count == 1) sum /= total_of(i / QUADS);
        [[unroll]] for (uint j = 0; j < 4; j++) {
            if (count == 1) result[first_head * DIM + 4 * i + j] = sum[j];
            else parts[mine + 2 * GROUP + 4 * i + j] = sum[j];
        }
    }
    if (count == 1) return;
    if (lane < GROUP) {
        parts[mine + lane] = greatest_of(lane);
        parts[mine + GROUP + lane] = total_of(lane);
    }
    memoryBarrierBuffer();
    barrier();
    if (lane == 0) last = atomicAdd(arrivals[m * kv_heads + kv_head], 1);
    barrier();
    if (last != count - 1) return;
    memoryBarrierBuffer();
    for (uint i = lane; i < GROUP * count; i += WG) factors[i / count * MAX_PARTS + i % count] = parts[from + i % count * ITEM + i / count];
    barrier();
    if (lane < GROUP) {
        float most = -INFINITY, sum = 0.0;
        for (uint p = 0; p < count; p++) most = max(most, factors[lane * MAX_PARTS + p]);
        for (uint p = 0; p < count; p++) {
            float factor = exp(factors[lane * MAX_PARTS + p] - most);
            factors[lane * MAX_PARTS + p] = factor;
            sum += factor * parts[from + p * ITEM + GROUP + lane];
        }
        all_totals[lane] = sum;
    }
    barrier();
    for (uint i = lane; i < GROUP * DIM; i += WG) {
        float sum = 0.0;
        [[unroll]] for (uint p = 0; p < MAX_PARTS; p++)
            if (p < count) sum += factors[i / DIM * MAX_PARTS + p] * parts[from + p * ITEM + 2 * GROUP + i];
        result[first_head * DIM + i] = sum / all_totals[i / DIM];
    }
    if (lane == 0) arrivals[m * kv_heads + kv_head] = 0;
}
