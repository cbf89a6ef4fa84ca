// A cluster of CLUSTER blocks chooses the token of one row, each looking at a share of the tokens. The threshold of top-k is found by
// bisection over the order-preserving integer form of floats, so that no sort is needed and ties are all kept. That of top-p is not
// looked for: a token is drawn from all, and stays if the more likely ones have less than the wanted mass; else only those are
// left, and another is drawn (decision 0026).
//
// HELD: vectors of four logits that a thread has, which then stay in its registers; 0 where a row is longer, or no multiple of four.
// GATED: only for rows that are undecided; the others have their tokens.
// TELLS, with HELD and clusters: also tells the log-probabilities of the chosen and of the likeliest tokens, as logprobs does.

#include "draw.cuh"
#define AHEAD (CLUSTER > 1 ? 4 : 8)
#define MAX_LOGPROBS 20 /* likeliest tokens of each */
#if HELD
#define MEASURE __forceinline__
#else
#define MEASURE __noinline__ /* as it is large (many loads in flight) and called three times */
#endif
#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

// The greatest candidate of the block, in every thread. Calls use one of two places by turns: a warp may still read the last one.
__device__ __forceinline__ Candidate block_best(Candidate mine, int turn) {
    __shared__ Candidate parts[2][WG / WARP];
    mine = warp_best(mine);
    if (threadIdx.x % WARP == 0) parts[turn % 2][threadIdx.x / WARP] = mine;
    __syncthreads();
    int lane = threadIdx.x % WARP;
    return warp_best(lane < WG / WARP ? parts[turn % 2][lane] : 0);
}

// What the blocks of a cluster tell one another. Messages go to two places by turns: a block may still read the last ones.
struct Blocks {
    unsigned long long (*places)[CLUSTER];
    int rank, turn;

    // Every block's number, in the order of their ranks. All threads call it with their block's.
    __device__ __forceinline__ const unsigned long long *gather(unsigned long long mine) {
        unsigned long long *place = places[turn++ % 2];
        if (threadIdx.x < CLUSTER) store_word(place + rank, mine, threadIdx.x);
        __syncwarp();
        cluster_arrive(), cluster_wait();
        return place;
    }
    template <class Op>
    __device__ __forceinline__ float reduce(float value) {
        value = block_reduce<Op>(value);
        if (CLUSTER == 1) return value;
        const unsigned long long *all = gather(__float_as_uint(value));
        value = Op::identity;
        for (int i = 0; i < CLUSTER; i++) value = Op::of(value, __uint_as_float((unsigned)all[i]));
        return value;
    }
    __device__ __forceinline__ Candidate best(Candidate mine) {
        mine = block_best(mine, turn);
        if (CLUSTER == 1) return mine;
        const unsigned long long *all = gather(mine);
        for (int i = 0; i < CLUSTER; i++) mine = max(mine, all[i]);
        return mine;
    }
};

struct Row {
    const float *logits;
    int n;
    float inverse;  // of the temperature
#if HELD
    float4 held[HELD];  // of this thread
#endif
};

// Calls f(v, z) for each of this thread's tokens, with UNROLL loads in flight and as many copies of f compiled.
template <int UNROLL, class F>
__device__ __forceinline__ void each_token(const Row &row, F f) {
    int first = blockIdx.x % CLUSTER * WG + threadIdx.x, n = row.n;
#if HELD
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int k = first + i * CLUSTER * WG;
        float4 z = times(row.held[i], row.inverse);
        if (k >= n / 4) break;
        f(4 * k, z.x);
        f(4 * k + 1, z.y);
        f(4 * k + 2, z.z);
        f(4 * k + 3, z.w);
    }
#else
    if (n % 4 == 0) {
#pragma unroll UNROLL
        for (int k = first; k < n / 4; k += CLUSTER * WG) {
            float4 z = times(((const float4 *)row.logits)[k], row.inverse);
            f(4 * k, z.x);
            f(4 * k + 1, z.y);
            f(4 * k + 2, z.z);
            f(4 * k + 3, z.w);
        }
    } else {
        for (int v = first; v < n; v += CLUSTER * WG) f(v, row.logits[v] * row.inverse);
    }
#endif
}

// Over the tokens whose key is at least `least`: how many there are, or the sum of e^(z - top).
__device__ MEASURE float measure(Blocks &blocks, const Row &row, unsigned least, bool mass, float top) {
    float sum = 0.0f;
    each_token<AHEAD>(row, [&](int, float z) {
        if (float_key(z) >= least) sum += mass ? expf(z - top) : 1.0f;
    });
    return blocks.reduce<Sum>(sum);
}

// The greatest key that so many tokens reach.
__device__ __forceinline__ unsigned threshold(Blocks &blocks, const Row &row, float wanted) {
    unsigned low = 0, high = 0xFFFFFFFFu;
    while (low < high) {
        unsigned middle = low + (high - low) / 2 + 1;
        float count = measure(blocks, row, middle, false, 0.0f);
        if (count >= wanted) low = middle;
        else high = middle - 1;
        if (count == wanted) break;
    }
    return low;
}

#if TELLS
// What the blocks find is put together by block 0, which stores the likeliest tokens at `out`.
struct Found {
    float greatest, rest;  // the greatest logit, and what else log-probabilities have less; in block 0
    Candidate best;        // of the numbers; in warp 0 of block 0, as the next is
    bool odd;              // there is a NaN
};
__device__ __forceinline__ Found find_likeliest(const Row &row, int rank, int k, int *out) {
    __shared__ unsigned long long lists[CLUSTER][MAX_LOGPROBS], sums[CLUSTER], odd[CLUSTER];
    __shared__ Candidate list[MAX_LOGPROBS];
    float last_z = INFINITY_F, top = -INFINITY_F, sum = 0.0f;
    int last = -1, count = max(k, 1);
    bool no_numbers = false;
    // The likeliest of this thread's tokens that come behind its last one.
    auto next = [&]() {
        float best = 0.0f;
        int token = -1;
        each_token<AHEAD>(row, [&](int v, float z) {  // in the order of v
            bool behind = z < last_z || (z == last_z && v > last);
            if (behind && (token < 0 || z > best)) best = z, token = v;
        });
        last_z = best, last = token;
        return token < 0 ? (Candidate)0 : candidate(best, token);
    };
    Candidate mine = next();
    each_token<AHEAD>(row, [&](int, float z) { no_numbers |= no_number(z); });
    for (int j = 0; j < count; j++) {
        Candidate best = block_best(mine, j);
        if (threadIdx.x == 0) list[j] = best;
        if (j == 0) top = logit_of(best);
        if (mine == best && mine != 0) mine = next();
    }
    each_token<AHEAD>(row, [&](int, float z) { sum += z > -INFINITY_F ? expf(z - top) : 0.0f; });
    sum = block_reduce<Sum>(sum);
    no_numbers = __syncthreads_or(no_numbers);
    if (threadIdx.x < count) store_word(lists[rank] + threadIdx.x, list[threadIdx.x], 0);
    if (threadIdx.x == 0) {
        store_word(sums + rank, (unsigned long long)__float_as_uint(top) << 32 | __float_as_uint(sum), 0);
    }
    if (threadIdx.x == WARP) store_word(odd + rank, no_numbers, 0);
    __syncwarp();
    cluster_arrive(), cluster_wait();
    Found found = {};
    if (rank > 0 || threadIdx.x >= WARP) return found;
    int lane = threadIdx.x, taken = 0;
    top = lane < CLUSTER ? __uint_as_float((unsigned)(sums[lane] >> 32)) : -INFINITY_F;
    found.greatest = warp_reduce<Max>(top);
    sum = top > -INFINITY_F ? __uint_as_float((unsigned)sums[lane]) * expf(top - found.greatest) : 0.0f;
    found.rest = logf(warp_reduce<Sum>(sum));
    for (int j = 0; j < count; j++) {
        mine = lane < CLUSTER && taken < count ? lists[lane][taken] : 0;
        Candidate best = warp_best(mine);
        if (mine != 0 && mine == best) taken++;
        if (j == 0) found.best = best;
        if (lane == 0 && j < k) out[j] = token_of(best), out[k + j] = __float_as_int(logit_of(best) - found.greatest - found.rest);
    }
    found.odd = __any_sync(FULL, lane < CLUSTER && odd[lane]);
    return found;
}
#endif

extern "C" __global__ void IN_CLUSTER __launch_bounds__(WG)
sample(const int *step, int rows, int temperatures, int top_ks, int top_ps, int min_ps, int seeds_lo, int seeds_hi, int token_seq,
       int seq_begin, int seq_len, const float *logits, int *out,
#if GATED
       const int *undecided,
#endif
#if TELLS
       int *history,
#endif
       int n) {
    __shared__ unsigned long long places[2][CLUSTER];
    int r = blockIdx.x / CLUSTER;
    Blocks blocks = {places, (int)blockIdx.x % CLUSTER, 0};
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
#if GATED
    if (!undecided[r]) return;
#endif
    cluster_arrive();
    float temperature = __int_as_float(step[temperatures + r]);
    bool greedy = temperature == 0.0f;
    Row row = {logits + (size_t)r * n, n, 1.0f};
#if HELD
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int k = (blocks.rank + i * CLUSTER) * WG + threadIdx.x;
        row.held[i] = k < n / 4 ? ((const float4 *)row.logits)[k] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#endif
#if TELLS
    int likeliest = STEP_LOGPROBS(step) - 1;
    int *logprobs_at = history + ((size_t)STEP_DONE(step) * STEP_ROWS(step) + r) * (1 + 2 * likeliest);
    cluster_wait();
    Found found = find_likeliest(row, blocks.rank, likeliest, logprobs_at + 1);
    if (greedy) {
        if (threadIdx.x > 0 || blocks.rank > 0) return;
        out[r] = found.odd ? -1 : winner(found.best);
        logprobs_at[0] = __float_as_int(logit_of(found.best) - found.greatest - found.rest);
        return;
    }
    cluster_arrive();
#endif
    if (!greedy) row.inverse = 1.0f / temperature;
    unsigned least = 0, position = 0;
    float floor_z = -INFINITY_F, top = -INFINITY_F, top_p = 1.0f, wanted = 0.0f;
    if (!greedy) {
        position = token_position(step, token_seq, seq_begin, seq_len, step[rows + r]) + 1;
        each_token<AHEAD>(row, [&](int, float z) { top = fmaxf(top, z); });
    }
    cluster_wait();  // all blocks have begun, and have shared memory that others may write
    if (!greedy) {
        top = blocks.reduce<Max>(top);
        int top_k = step[top_ks + r];
        float min_p = __int_as_float(step[min_ps + r]);
        top_p = __int_as_float(step[top_ps + r]);
        if (top_k > 0 && top_k < n) least = threshold(blocks, row, top_k);
        if (top_p < 1.0f) wanted = top_p * measure(blocks, row, least, true, top);
        if (min_p > 0.0f) floor_z = top + logf(min_p);
    }
    for (;;) {
        Candidate best = 0;
        if (greedy) {
            each_token<AHEAD>(row, [&](int v, float z) { best = max(best, candidate(z, v)); });
        } else {
#if HELD
#pragma unroll
#endif
            for (int j = 0; j < (HELD ? HELD : n); j++) {
                int v = 4 * ((blocks.rank + j * CLUSTER) * WG + threadIdx.x);
                if (v >= n) break;
                float z[4];
                bool in[4];
#if HELD
                z[0] = row.held[j].x, z[1] = row.held[j].y, z[2] = row.held[j].z, z[3] = row.held[j].w;
#else
                for (int i = 0; i < 4; i++) z[i] = row.logits[min(v + i, n - 1)];
#endif
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    z[i] *= row.inverse;
                    in[i] = v + i < n && (no_number(z[i]) || (float_key(z[i]) >= least && !(z[i] < floor_z)));
                }
                if (!(in[0] || in[1] || in[2] || in[3])) continue;
                uint4 words = noise_words(step[seeds_lo + r], step[seeds_hi + r], v, position);
                if (in[0]) best = max(best, candidate(z[0] + gumbel_of(words.x), v));
                if (in[1]) best = max(best, candidate(z[1] + gumbel_of(words.y), v + 1));
                if (in[2]) best = max(best, candidate(z[2] + gumbel_of(words.z), v + 2));
                if (in[3]) best = max(best, candidate(z[3] + gumbel_of(words.w), v + 3));
            }
        }
        best = blocks.best(best);
        int token = winner(best);
        if (top_p < 1.0f && token >= 0) {
            unsigned more = float_key(row.logits[token] * row.inverse) + 1;
            float mass = measure(blocks, row, more, true, top);  // of the tokens more likely than the chosen one
            if (mass > 0.0f && mass >= wanted) {
                least = more;
                continue;
            }
        }
        if (threadIdx.x > 0 || blocks.rank > 0) return;
        out[r] = token;
#if TELLS
        logprobs_at[0] = __float_as_int(row.logits[max(token, 0)] - found.greatest - found.rest);
#endif
        return;
    }
}
