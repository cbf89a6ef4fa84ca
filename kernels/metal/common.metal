// Shared by every kernel here; put in front of each source. WG is the number of threads of a threadgroup, a multiple of 32
// or, where rows are short, a part of a simdgroup.
// The step buffer's header: word 0 tokens (M), 1 sequences (S), 2 rows (R), 3 decode steps done in this run.
// Sources are compiled without fast math; functions that may lose accuracy are called in their `precise` form all the same.
#include <metal_stdlib>
using namespace metal;
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#endif

#ifndef WG
#define WG 32
#endif
#if WG % 32 && WG > 32
#error "a threadgroup has whole simdgroups, or a part of one"
#endif

// Where a thread is, the last parameters of a kernel.
#define PLACE \
    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]], \
    uint lane_index [[thread_index_in_simdgroup]], uint simdgroup_index [[simdgroup_index_in_threadgroup]]
// The same as one value; PLACED makes it.
struct Place {
    int item, lane, simdgroup;
};
#define PLACED Place{int(index), int(lane_index), int(simdgroup_index)}
#define SIMDGROUPS ((WG + 31) / 32)
#define GROUP_BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)

#define STEP_TOKENS(step) ((step)[0])
#define STEP_SEQS(step) ((step)[1])
#define STEP_ROWS(step) ((step)[2])
#define STEP_DONE(step) ((step)[3])
#define STEP_LOGPROBS(step) ((step)[6])

#if WEIGHT_F16
#define WEIGHT half
#define WEIGHT4 half4
#else
#define WEIGHT float
#define WEIGHT4 float4
#endif
#ifndef KV_I8
#define KV_I8 0
#endif
#if KV_I8
#define KV char
#define KV4 char4
#elif KV_F16
#define KV half
#define KV4 half4
#else
#define KV float
#define KV4 float4
#endif

// The entry in which a sequence's states are before a pass: the one it read first, then the one that it writes.
#define STATE_SOURCE(step, state_from, state_to, seq) ((step)[(STEP_DONE(step) ? (state_to) : (state_from)) + (seq)])

// Position in its sequence of token m.
inline int token_position(device const int *step, int token_seq, int seq_begin, int seq_len, int m) {
    int s = step[token_seq + m];
    return step[seq_len + s] - step[seq_begin + s + 1] + m;
}

// The first position that the last of `length` positions attends to; WINDOW 0: all of them.
#ifndef WINDOW
#define WINDOW 0
#endif
#define WINDOW_BEGIN(length) ((WINDOW) ? max(0, (length) - (WINDOW)) : 0)

// The cache is [blocks, BLOCK, kv_heads, DIM]. A block of int8 codes is followed by its rows' scales, [BLOCK, kv_heads] floats.
#if defined(BLOCK) && defined(DIM)
#define CACHE_ROW (DIM + KV_I8 * 4) /* elements of a row, with its scale */

// Place in the cache, in elements, of position p of the sequence with this block table.
inline ulong cache_place(device const int *table, int p, int kv_heads, int kv_head) {
    return ulong(kv_heads) * (ulong(table[p / BLOCK]) * (BLOCK * CACHE_ROW) + ulong(p % BLOCK) * DIM) + ulong(kv_head) * DIM;
}

#if KV_I8
// Place of that row's scale, in bytes.
inline ulong scale_place(device const int *table, int p, int kv_heads, int kv_head) {
    return ulong(kv_heads) * (ulong(table[p / BLOCK]) * (BLOCK * CACHE_ROW) + BLOCK * DIM + ulong(p % BLOCK) * 4) + ulong(kv_head) * 4;
}
inline float scale_at(device const KV *cache, ulong place) { return *(device const float *)(cache + place); }
#endif
#endif

// A sum and a maximum over the threadgroup, the same in every thread. Earlier writes to threadgroup memory are visible to all
// afterwards. `scratch` has an element for each simdgroup.
inline float2 group_sum_max(float2 value, threadgroup float2 *scratch, Place place) {
    value = float2(simd_sum(value.x), simd_max(value.y));
    GROUP_BARRIER;
    if (place.lane == 0) scratch[place.simdgroup] = value;
    GROUP_BARRIER;
    value = scratch[0];
    for (int i = 1; i < SIMDGROUPS; i++) value = float2(value.x + scratch[i].x, fmax(value.y, scratch[i].y));
    return value;
}
inline float group_sum(float value, threadgroup float2 *scratch, Place place) {
    return group_sum_max(float2(value, 0.0f), scratch, place).x;
}
inline float group_max(float value, threadgroup float2 *scratch, Place place) {
    return group_sum_max(float2(0.0f, value), scratch, place).y;
}

// The greatest magnitude of four numbers.
inline float magnitude(float4 v) {
    v = fabs(v);
    return fmax(fmax(v.x, v.y), fmax(v.z, v.w));
}

// Minimum of a row's greatest magnitude, from which absmax quantisation takes its factor.
#define QUANT_FLOOR 1e-5f

// Four numbers as int8, ties to even.
inline char4 to_int8(float4 v) { return char4(clamp(rint(v), -128.0f, 127.0f)); }

inline int sum4(char4 v) { return int(v.x) + int(v.y) + int(v.z) + int(v.w); }

// The activation between gate and up.
inline float act(float g) {
#if RELU2
    float r = fmax(g, 0.0f);
    return r * r;
#elif GELU
    return g / (1.0f + precise::exp(-1.5957691216f * g * (1.0f + 0.044715f * g * g)));  // (1 + tanh(z)) / 2 = sigmoid(2z)
#else
    return g / (1.0f + precise::exp(-g));
#endif
}

inline float sigmoid(float g) { return 1.0f / (1.0f + precise::exp(-g)); }
inline float silu(float g) { return g / (1.0f + precise::exp(-g)); }
