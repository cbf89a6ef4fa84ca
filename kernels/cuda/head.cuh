// Shared by the kernels of the compact head (decision 0060).
//
// ADJUST: the logits of rows that name a slot are adjusted first. A greater score has a greater adjusted one, so bounds stay bounds.
// FILTERED: rows may have top-k, top-p and min-p (decision 0026).
#include "draw.cuh"
#if ADJUST
#include "adjust.cuh"
#define ADJUSTMENT_FIELDS , int slots, int repetitions, int presences, int frequencies, const int *slot_marks, const float *slot_biases
#define ADJUSTMENT_AT , {slots, repetitions, presences, frequencies, slot_marks, slot_biases}
#else
#define ADJUSTMENT_FIELDS
#define ADJUSTMENT_AT
#endif
#if FILTERED
#include "filter.cuh"
#define FILTER_FIELDS , int top_ks, int top_ps, int min_ps
#define FILTER_AT , top_ks, top_ps, min_ps
#else
#define FILTER_FIELDS
#define FILTER_AT
#endif

// A hash of k in [0, 1): multiples of the golden ratio, scrambled.
__device__ __forceinline__ float head_dither(unsigned k) {
    unsigned a = (k + 1) * 0x9E3779B9u;
    a = (a ^ a >> 16) * 0x85EBCA6Bu;
    a = (a ^ a >> 13) * 0xC2B2AE35u;
    return (float)((a ^ a >> 16) >> 8) * 0x1p-24f;
}

// Offset of column k: 7.5 and a dither in [-1/2, 1/2).
__device__ __forceinline__ float head_offset(unsigned k) { return 7.5f + (head_dither(k) - 0.5f); }

// The head is one buffer: codes[rows][COLS / 2], then {step, norm}[rows], then column[COLS].
__device__ __forceinline__ size_t head_sizes_at(int rows) { return (size_t)rows * (COLS / 2); }
__device__ __forceinline__ size_t head_columns_at(int rows) { return head_sizes_at(rows) + (size_t)rows * sizeof(float2); }

// Bound on a score's error, for the `params` of a row of x and the sizes of a row of the head. Two errors, independent
// and sub-Gaussian: the weights', and (one plane) that of x, for which `stored` must be the bound by the weights alone; or
// (two planes) a known error of x.
__device__ __forceinline__ float head_doubt(int planes, float4 params, float2 size) {
    float weights = params.z * size.x;
    if (planes == 2) return fmaf(params.w, size.y, weights);
    float stored = fmaf(size.x, sqrtf((float)COLS), size.y), x = params.w * stored;
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(fmaf(weights, weights, x * x)));  // within the 1 % of `params`
    return root;
}

// How a row's token is chosen: the greatest logit, or with noise added.
struct Choice {
    float inverse;  // of the temperature; 0 where it is
    unsigned seed_lo, seed_hi, position;
#if FILTERED
    Filter filter;
#endif
#if ADJUST
    Adjustment adjustment;
#endif
};

struct ChoiceFields {  // where the step has them, in words
    int rows, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len;
#if FILTERED
    int top_ks, top_ps, min_ps;
#endif
#if ADJUST
    AdjustmentFields adjustment;
#endif
};

// How a row's token is chosen from `vocabulary` rows of the head.
__device__ __forceinline__ Choice head_choice(const int *step, const ChoiceFields &at, int r, int vocabulary) {
    float temperature = __int_as_float(step[at.temperatures + r]);
    Choice choice = {};
    if (temperature != 0.0f) {
        choice.inverse = 1.0f / temperature;
        choice.seed_lo = step[at.seeds_lo + r], choice.seed_hi = step[at.seeds_hi + r];
        choice.position = token_position(step, at.token_seq, at.seq_begin, at.seq_len, step[at.rows + r]) + 1;
    }
#if FILTERED
    choice.filter = row_filter(step, at.top_ks, at.top_ps, at.min_ps, r, temperature == 0.0f, vocabulary);
#endif
#if ADJUST
    choice.adjustment = row_adjustment(step, at.adjustment, r, vocabulary);
#endif
    return choice;
}

__device__ __forceinline__ float head_key(const Choice &choice, float score, int n) {
#if ADJUST
    score = adjusted(choice.adjustment, score, n);
#endif
    if (choice.inverse == 0.0f) return score;
    return score * choice.inverse + gumbel(choice.seed_lo, choice.seed_hi, n, choice.position);
}

// The logit over the temperature, as `sample` has it.
__device__ __forceinline__ float head_z(const Choice &choice, float score, int n) {
#if ADJUST
    score = adjusted(choice.adjustment, score, n);
#endif
    return __fmul_rn(score, choice.inverse);
}

#if FILTERED
// The greatest z that a row of the head may have, for its rough score, and its u (filter.cuh).
__device__ __forceinline__ float head_high(int planes, const Choice &choice, float4 params, float2 size, float score, int n) {
    return head_z(choice, fmaf(RAISED, head_doubt(planes, params, size), score), n);
}
__device__ __forceinline__ float head_size(int planes, const Choice &choice, float4 params, float2 size, float score, int n) {
    return log_size(choice.filter, head_z(choice, score, n), head_high(planes, choice, params, size, score, n));
}
#endif

// Maximum over the lanes with the same remainder modulo 4.
__device__ __forceinline__ Candidate best_of_groups(Candidate mine) {
    for (int i = 4; i < WARP; i *= 2) mine = max(mine, __shfl_xor_sync(FULL, mine, i));
    return mine;
}

#define CHOICE_FIELDS int rows_at, int temperatures, int seeds_lo, int seeds_hi, int token_seq, int seq_begin, int seq_len FILTER_FIELDS ADJUSTMENT_FIELDS
#define CHOICE_AT ChoiceFields{rows_at, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len FILTER_AT ADJUSTMENT_AT}
