// Log-probabilities of each row from the unadjusted logits: of the chosen token, and of as many likeliest ones as the
// step requests. logprobs_parts finds the likeliest of each share of a row, of EACH * WG logits; logprobs puts what it
// found together. A part is PITCH words: the greatest logit, the sum of e^(z - greatest), then tokens in order, then
// their logits.
#include "draw.cuh"
#define MAX_LOGPROBS 20
#define PITCH (2 + 2 * MAX_LOGPROBS)

// The greatest candidate of the block, in every thread.
__device__ __forceinline__ Candidate block_best(Candidate mine) {
    __shared__ Candidate best[WG / WARP];
    mine = warp_best(mine);
    __syncthreads();
    if (threadIdx.x % WARP == 0) best[threadIdx.x / WARP] = mine;
    __syncthreads();
    for (int i = 0; i < WG / WARP; i++) mine = max(mine, best[i]);
    return mine;
}

extern "C" __global__ void __launch_bounds__(WG) logprobs_parts(const int *step, const float *logits, int *parts, int n, int count) {
    start_dependents();
    wait_for_before();
    int r = blockIdx.y, begin = blockIdx.x * EACH * WG + threadIdx.x, k = STEP_LOGPROBS(step) - 1;
    if (r >= STEP_ROWS(step)) return;
    int *part = parts + ((size_t)r * count + blockIdx.x) * PITCH;
    float z[EACH], top = -INFINITY_F, sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < EACH; i++) {
        int v = begin + i * WG;
        z[i] = v < n ? logits[(size_t)r * n + v] : -INFINITY_F;
        top = fmaxf(top, z[i]);
    }
    top = block_reduce<Max>(top);
#pragma unroll 8
    for (int i = 0; i < EACH; i++) sum += z[i] > -INFINITY_F ? expf(z[i] - top) : 0.0f;
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) part[0] = __float_as_int(top), part[1] = __float_as_int(sum);
    Candidate last = NO_NUMBER;
    for (int j = 0; j < k; j++) {
        Candidate mine = 0;
#pragma unroll 8
        for (int i = 0; i < EACH; i++) {
            int v = begin + i * WG;
            Candidate c = v < n ? candidate(z[i], v) : 0;
            if (c < last) mine = max(mine, c);
        }
        last = block_best(mine);
        if (threadIdx.x == 0) part[2 + j] = token_of(last), part[2 + MAX_LOGPROBS + j] = __float_as_int(logit_of(last));
    }
}

// A block a row; there are no more parts than threads.
extern "C" __global__ void __launch_bounds__(WG)
logprobs(const int *step, const float *logits, const int *parts, const int *next, int *history, int n, int count) {
    start_dependents();
    wait_for_before();
    int r = blockIdx.x, t = threadIdx.x, k = STEP_LOGPROBS(step) - 1, taken = 0;
    if (r >= STEP_ROWS(step)) return;
    const int *part = parts + ((size_t)r * count + min(t, count - 1)) * PITCH;
    float top = t < count ? __int_as_float(part[0]) : -INFINITY_F;
    float greatest = block_reduce<Max>(top);
    float sum = block_reduce<Sum>(t < count && top > -INFINITY_F ? __int_as_float(part[1]) * expf(top - greatest) : 0.0f);
    float rest = logf(sum);
    int *out = history + ((size_t)STEP_DONE(step) * STEP_ROWS(step) + r) * (1 + 2 * k);
    if (t == 0) out[0] = __float_as_int(logits[(size_t)r * n + max(next[r], 0)] - greatest - rest);
    for (int j = 0; j < k; j++) {
        bool has = t < count && taken < k && part[2 + taken] >= 0;
        Candidate mine = has ? candidate(__int_as_float(part[2 + MAX_LOGPROBS + taken]), part[2 + taken]) : 0;
        Candidate best = block_best(mine);
        if (has && mine == best) taken++;
        if (t == 0) out[1 + j] = token_of(best), out[1 + k + j] = __float_as_int(logit_of(best) - greatest - rest);
    }
}
