// PAIR: a product of two matrices with the same x, whose tiles of rows follow one another. The first one's results are the x of a
// causal_conv of sequences that have one token each: its results are stored in place of them.
#if PAIR
#include "conv.cuh"
#define PAIR_ARGS(Codes, Scales)                                                                                                  \
    , const Codes codes2, const Scales *w_scale2, float *out2, int rows2, int token_seq, int state_from, int state_to,              \
        const float *conv_weight, float *conv_state
#define OF(tile, first, second) ((tile) < first_tiles ? (first) : (second))
#define PUT(tile, m, row, value)                                                                                                  \
    ((tile) < first_tiles ? out[(size_t)(m) * rows + (row)] =                                                                     \
                                convolve_one(value, row, step[token_seq + (m)], step, state_from, state_to, conv_weight, conv_state, rows) \
                          : out2[(size_t)(m) * rows2 + (row)] = (value))
#else
#define PAIR_ARGS(Codes, Scales)
#define OF(tile, first, second) (first)
#endif
