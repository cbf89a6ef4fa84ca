// Decides whether each row's winner also passes the filters: certain from the sampled rows of the head (filter.cuh), or
// undecided. For undecided rows all logits are computed and `sample` draws. One block for each row of x. It resets the
// sums of the preceding kernels to zero. Decision 0026 has the proof.
#include "head.cuh"

// The greatest key that at least `wanted` of the `count` numbers reach; 0 where there are fewer numbers.
__device__ __forceinline__ unsigned kth_greatest(const unsigned *keys, int count, float wanted) {
    unsigned low = 0, high = 0xFFFFFFFFu;
    while (low < high) {
        unsigned middle = low + (high - low) / 2 + 1;
        float reach = 0.0f;
        for (int i = threadIdx.x; i < count; i += WG) reach += keys[i] >= middle ? 1.0f : 0.0f;
        reach = block_reduce<Sum>(reach);
        if (reach >= wanted) low = middle;
        else high = middle - 1;
        if (reach == wanted) break;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(WG)
head_decide(const int *step, CHOICE_FIELDS, const float *scores, const Candidate *best, const float *log_rates, unsigned *peaks,
            int *bins, unsigned *bars, int *counts, const float2 *lists, int *undecided, int rows) {
    __shared__ unsigned keys[CAPACITY];  // keys of rows that were certain to be taken; 0 for the others
    int r = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    Choice choice = head_choice(step, CHOICE_AT, r, rows);
    const Filter &f = choice.filter;
    int token = winner(best[r]), count = counts[r];
    unsigned bar = bars[r];  // 0: there is no such row
    float log_rate = f.on ? log_rates[r] : 0.0f;  // head_floor finds none for a row without filters
    __syncthreads();
    if (threadIdx.x == 0) peaks[r] = bars[r] = 0, counts[r] = 0;
    if (threadIdx.x < BINS) bins[r * BINS + threadIdx.x] = 0;
    bool known = !f.on || token < 0, able = fabsf(log_rate) < INFINITY_F && count <= CAPACITY && f.top_k <= MAX_TOP_K;
    if (known || !able) {
        if (threadIdx.x == 0) undecided[r] = !known;
        return;
    }
    float z_w = head_z(choice, scores[(size_t)r * rows + token], token);
    float evidence = 0.0f, more = 0.0f, above = 0.0f, greatest = Max::identity;
    const float2 *list = lists + (size_t)r * CAPACITY;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += WG) {
        float z = list[i].x, chance = list[i].y, size = expf(z + log_rate), bet = f.bet * size;
        bool sure = chance >= 1.0f, likelier = z > z_w;
        bool counts_above = likelier && (sure || bet * (1.0f - f.share) <= MAX_BET * chance);
        bet *= (counts_above ? 1.0f : 0.0f) - f.share;
        evidence += sure ? -bet : log1pf(-bet / chance);
        keys[i] = sure ? float_key(z) : 0;
        if (!sure) continue;
        greatest = fmaxf(greatest, z);
        if (likelier) more += 1.0f, above += size;
    }
    evidence = block_reduce<Sum>(evidence);
    more = block_reduce<Sum>(more);
    above = block_reduce<Sum>(above);
    greatest = block_reduce<Max>(greatest);
    bool all_known = bar == 0 || !(z_w < key_float(bar));  // all tokens likelier than the winner were certain to be taken
    bool passes = true;
    if (f.top_k > 0) passes = all_known && more < f.top_k;
    if (f.min_z > -INFINITY_F) passes = passes && !(z_w < (bar ? fmaxf(greatest, key_float(bar)) : greatest) + f.min_z);
    if (passes && f.top_p < 1.0f && f.top_k > 0 && more > 0.0f) {  // top-p is a share of the mass of the k likeliest
        unsigned least = kth_greatest(keys, count, f.top_k);
        float mass = 0.0f;
        for (int i = threadIdx.x; i < count; i += WG) {
            if (keys[i] > 0 && keys[i] >= least) mass += expf(list[i].x + log_rate);
        }
        mass = block_reduce<Sum>(mass);
        passes = (least == 0 || least >= bar) && above < f.share * mass;
    } else if (f.top_p < 1.0f) {
        passes = passes && (evidence >= WRONG || (all_known && more == 0.0f));
    }
    if (threadIdx.x == 0) undecided[r] = !passes;
}
