// Filtered draws over the compact head (decision 0026): the probability with which a row of the head is taken, which means scored
// from the full weights to measure masses, and how a mass is compared with top-p. The same as in kernels/cuda/filter.cuh.
//
// A row with the mass m is taken with the probability min(1, rate e^u). `u` is the larger of its rough z and its greatest possible
// z less `spare`. So among the rows above the winner, rate * m * bet * (1 - share) exceeds MAX_BET of the probability only where
// the error is beyond RAISED bounds. Such rows count as not above, and have less than half of MARGIN of all mass. The rate is
// chosen so that SAMPLES rows are taken on average.
const float WRONG = 29.5;                   // -ln of the probability that a token is accepted wrongly because of the rows taken
const float RAISED = 8.9 / 7.5;             // of the bound: for 8.9 standard deviations instead of 7.5
const float MARGIN = 2.44140625e-4;         // half for rows beyond their bounds, half for the rounding of sums
const float MAX_BET = 0.9, SAMPLES = 4096.0;
const uint CAPACITY = 4096 + 16 * 64;       // 16 standard deviations above the average
const int MAX_TOP_K = 8192;

struct Filter {
    bool on;  // otherwise the greatest key wins without a check
    int top_k;  // 0: all tokens
    float top_p, share, min_z;  // `share`: top-p less MARGIN; `min_z`: of the log of min-p
    float bet, spare;
};

Filter row_filter(uint r, int vocabulary) {
    int top_k = step_data[top_ks + r];
    float top_p = intBitsToFloat(step_data[top_ps + r]), min_p = intBitsToFloat(step_data[min_ps + r]), share = top_p - MARGIN;
    if (top_k >= vocabulary) top_k = 0;
    bool on = step_data[temperatures + r] != 0 && (top_k > 0 || top_p < 1.0 || min_p > 0.0);
    float bet = 0.0, spare = INFINITY;
    if (top_p < 1.0 && share > 0.0) {  // the best bet if all rows had the same rough mass
        bet = sqrt(2.0 * WRONG / (SAMPLES * share * (1.0 - share)));
        spare = log(MAX_BET / (bet * (1.0 - share)));
    }
    return Filter(on, top_k, top_p, share, min_p > 0.0 ? log(min_p) : -INFINITY, bet, spare);
}

// u, for a row's rough z and its greatest possible one; and where it is counted.
float log_size(Filter f, float z, float high) { return max(z, high - f.spare); }
uint bin_of(float u) { return uint(int(floor(u))) & BINS - 1; }

// The probability, in steps of 2^-32 and never 0; a NaN is always taken.
float chance_of(float log_size, float log_rate) {
    float chance = exp(log_size + log_rate);
    return no_number(chance) || chance >= 1.0 ? 1.0 : max(ceil(chance * 4294967296.0), 1.0) * 2.3283064365386963e-10;
}
bool takes(float chance, uint word) { return chance >= 1.0 || word < uint(chance * 4294967296.0); }

// ln(1 - t)
float log1m(float t) { return t < -1.0 ? log(1.0 - t) : -minus_log1m(t); }
