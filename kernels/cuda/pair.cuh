// PAIR: a product of two matrices with the same x, whose tiles of rows follow one another. The first one's results are the x of a
// causal_conv of sequences that have one token each: its results are stored in place of them. COLUMN fetches what that needs besides.
#if PAIR
#include "conv.cuh"
#define PAIR_ARGS(Codes, Scales)                                                                                                  \
    , const Codes codes2, const Scales *w_scale2, float *out2, int rows2, int token_seq, int state_from, int state_to,              \
        const float *conv_weight, float *conv_state
#define OF(tile, first, second) ((tile) < first_tiles ? (first) : (second))
#define COLUMN(column, tile, seq, row)                                                                                            \
    if ((tile) < first_tiles) (column).fetch(row, (seq).from, (seq).to, conv_weight, conv_state, rows)
#define PUT(column, tile, m, row, value)                                                                                            \
    ((tile) < first_tiles ? out[(size_t)(m) * rows + (row)] = (column).convolve(value, rows) : out2[(size_t)(m) * rows2 + (row)] = (value))

// Entries of the state of a token's sequence: that before the token, and that behind it.
struct ConvEntries {
    int from, to;
};
__device__ __forceinline__ ConvEntries entries_of(int m, const int *step, int token_seq, int state_from, int state_to) {
    int seq = step[token_seq + m], to = step[state_to + seq];
    return {STEP_DONE(step) ? to : step[state_from + seq], to};
}
#else
#define PAIR_ARGS(Codes, Scales)
#define OF(tile, first, second) (first)
#endif
