// Shared by the kernels of the compact head (decision 0060).
#include "draw.metal"
#define MAX_ROWS 8 /* of x */

// How a row's token is chosen: the greatest logit, or with noise added.
struct Choice {
    float inverse;  // of the temperature; 0 where it is
    uint seed_lo, seed_hi, position;
};

// Where a step has what a Choice is made of, the parameters of every kernel that makes one.
struct ChoiceAt {
    int rows, temperatures, seeds_lo, seeds_hi, token_seq, seq_begin, seq_len;
};

inline Choice head_choice(device const int *step, ChoiceAt at, int r) {
    float temperature = as_type<float>(step[at.temperatures + r]);
    if (temperature == 0.0f) return Choice{0.0f, 0u, 0u, 0u};
    uint position = uint(token_position(step, at.token_seq, at.seq_begin, at.seq_len, step[at.rows + r])) + 1u;
    return Choice{1.0f / temperature, uint(step[at.seeds_lo + r]), uint(step[at.seeds_hi + r]), position};
}

inline float head_key(Choice choice, float score, uint n) {
    if (choice.inverse == 0.0f) return score;
    return score * choice.inverse + gumbel(choice.seed_lo, choice.seed_hi, n, choice.position);
}
