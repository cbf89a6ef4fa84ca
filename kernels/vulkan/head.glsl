// Shared by the kernels of the compact head (decision 0060). Declared before it: step_data, and where the step has
// the parameters by which tokens are chosen.
#include "draw.glsl"
#include "head_layout.glsl"
#include "filter.glsl"

// How a row's token is chosen: the greatest logit, or with noise added.
struct Choice {
    float inverse;  // of the temperature; 0 where it is
    uint seed_lo, seed_hi, position;
};

Choice head_choice(uint r) {
    float temperature = intBitsToFloat(step_data[temperatures + r]);
    if (temperature == 0.0) return Choice(0.0, 0, 0, 0);
    int m = step_data[rows_at + r];
    return Choice(1.0 / temperature, uint(step_data[seeds_lo + r]), uint(step_data[seeds_hi + r]), TOKEN_POSITION(m) + 1);
}

float head_key(Choice choice, float score, uint n) {
    if (choice.inverse == 0.0) return score;
    return score * choice.inverse + gumbel(choice.seed_lo, choice.seed_hi, n, choice.position);
}
