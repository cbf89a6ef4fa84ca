// Filtered draws over the compact head (decision 0026): the probability with which a row of the head is sampled, that
// is, scored with the full weights to estimate masses, and the comparison of a mass with top-p.
//
// A row with the mass m is taken with the probability min(1, rate e^u). `u` is the larger of its rough z and its greatest possible
// z less `spare`. So among the rows above the winner, rate * m * bet * (1 - share) exceeds MAX_BET of the probability only where
// the error is beyond RAISED bounds. Such rows count as not above, and have less than half of MARGIN of all mass. The rate is
// chosen so that SAMPLES rows are taken on average (head_floor).
#define WRONG 29.5f /* -ln of the probability that a token is accepted wrongly because of the rows that are taken */
#define RAISED (8.9f / 7.5f) /* of the bound: for 8.9 standard deviations instead of 7.5 */
#define MARGIN 0x1p-12f /* half for rows beyond their bounds, half for the rounding of sums */
#define MAX_BET 0.9f
#define MAX_TOP_K 8192
#define BINS 256 /* in which rows are counted by u; threads of a block of head_floor, too */

struct Filter {
    bool on;  // otherwise the greatest key wins without a check
    int top_k;  // 0: all tokens
    float top_p, share, min_z;  // `share`: top-p less MARGIN; `min_z`: of the log of min-p
    float bet, spare;
};

__device__ __forceinline__ Filter row_filter(const int *step, int top_ks, int top_ps, int min_ps, int r, bool greedy, int vocabulary) {
    Filter f = {};
    int top_k = step[top_ks + r];
    float min_p = __int_as_float(step[min_ps + r]);
    f.top_p = __int_as_float(step[top_ps + r]);
    f.top_k = top_k < vocabulary ? top_k : 0;
    f.min_z = min_p > 0.0f ? logf(min_p) : -INFINITY_F;
    f.on = !greedy && (f.top_k > 0 || f.top_p < 1.0f || min_p > 0.0f);
    f.share = f.top_p - MARGIN;
    f.spare = INFINITY_F;
    if (f.top_p < 1.0f && f.share > 0.0f) {  // the best bet if all rows had the same rough mass
        f.bet = sqrtf(2.0f * WRONG / (SAMPLES * f.share * (1.0f - f.share)));
        f.spare = logf(MAX_BET / (f.bet * (1.0f - f.share)));
    }
    return f;
}

// u, for a row's rough z and its greatest possible one.
__device__ __forceinline__ float log_size(const Filter &f, float z, float high) { return fmaxf(z, high - f.spare); }

// The probability, in steps of 2^-32 and never 0; a NaN is always taken.
__device__ __forceinline__ float chance_of(float log_size, float log_rate) {
    float chance = expf(__fadd_rn(log_size, log_rate));
    return chance < 1.0f ? fmaxf(ceilf(chance * 0x1p32f), 1.0f) * 0x1p-32f : 1.0f;
}
__device__ __forceinline__ bool takes(float chance, unsigned word) { return chance >= 1.0f || word < (unsigned)(chance * 0x1p32f); }
