// A cluster of CLUSTER blocks chooses the token of one row, each looking at a share of the tokens. The threshold of top-k is found by
// bisection over the order-preserving integer form of floats, so that no sort is needed and ties are all kept. That of top-p is not
// looked for: a token is drawn from all, and stays if the more likely ones have less than the wanted mass; else only those are
// left, and another is drawn (decision 0026).
//
// GATED: only for rows that are undecided; the others have their tokens.

#include "draw.cuh"
#define AHEAD (CLUSTER > 1 ? 4 : 8)
#if CLUSTER > 1
#define IN_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTER
#endif

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
        __shared__ Candidate parts[WG / WARP];
        for (int i = WARP / 2; i > 0; i /= 2) mine = max(mine, __shfl_xor_sync(FULL, mine, i));
        __syncthreads();
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = mine;
        __syncthreads();
        for (int i = 0; i < WG / WARP; i++) mine = max(mine, parts[i]);
        if (CLUSTER == 1) return mine;
        const unsigned long long *all = gather(mine);
        for (int i = 0; i < CLUSTER; i++) mine = max(mine, all[i]);
        return mine;
    }
};

// Calls f(v, z) for each of this thread's tokens, with UNROLL loads in flight and as many copies of f compiled.
template <int UNROLL, class F>
__device__ __forceinline__ void each_token(const float *row, int n, float inverse, F f) {
    int first = blockIdx.x % CLUSTER * WG + threadIdx.x;
    if (n % 4 == 0) {
#pragma unroll UNROLL
        for (int k = first; k < n / 4; k += CLUSTER * WG) {
            float4 z = times(((const float4 *)row)[k], inverse);
            f(4 * k, z.x);
            f(4 * k + 1, z.y);
            f(4 * k + 2, z.z);
            f(4 * k + 3, z.w);
        }
    } else {
        for (int v = first; v < n; v += CLUSTER * WG) f(v, row[v] * inverse);
    }
}

// Not inlined, as it is large (many loads in flight) and called three times.
// Over the tokens whose key is at least `least`: how many there are, or the sum of e^(z - top).
__device__ __noinline__ float measure(Blocks &blocks, const float *row, int n, float inverse, unsigned least, bool mass, float top) {
    float sum = 0.0f;
    each_token<AHEAD>(row, n, inverse, [&](int, float z) {
        if (float_key(z) >= least) sum += mass ? expf(z - top) : 1.0f;
    });
    return blocks.reduce<Sum>(sum);
}

// The greatest key that so many tokens reach.
__device__ __forceinline__ unsigned threshold(Blocks &blocks, const float *row, int n, float inverse, float wanted) {
    unsigned low = 0, high = 0xFFFFFFFFu;
    while (low < high) {
        unsigned middle = low + (high - low) / 2 + 1;
        float count = measure(blocks, row, n, inverse, middle, false, 0.0f);
        if (count >= wanted) low = middle;
        else high = middle - 1;
        if (count == wanted) break;
    }
    return low;
}

extern "C" __global__ void IN_CLUSTER __launch_bounds__(WG)
sample(const int *step, int rows, int temperatures, int top_ks, int top_ps, int min_ps, int seeds_lo, int seeds_hi, int token_seq,
       int seq_begin, int seq_len, const float *logits, int *out,
#if GATED
       const int *undecided,
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
    const float *row = logits + (size_t)r * n;
    float temperature = __int_as_float(step[temperatures + r]);
    bool greedy = temperature == 0.0f;
    float inverse = greedy ? 1.0f : 1.0f / temperature;
    unsigned least = 0, position = 0;
    float floor_z = -INFINITY_F, top = -INFINITY_F, top_p = 1.0f, wanted = 0.0f;
    if (!greedy) {
        position = token_position(step, token_seq, seq_begin, seq_len, step[rows + r]) + 1;
        each_token<AHEAD>(row, n, inverse, [&](int, float z) { top = fmaxf(top, z); });
    }
    cluster_wait();  // all blocks have begun, and have shared memory that others may write
    if (!greedy) {
        top = blocks.reduce<Max>(top);
        int top_k = step[top_ks + r];
        float min_p = __int_as_float(step[min_ps + r]);
        top_p = __int_as_float(step[top_ps + r]);
        if (top_k > 0 && top_k < n) least = threshold(blocks, row, n, inverse, top_k);
        if (top_p < 1.0f) wanted = top_p * measure(blocks, row, n, inverse, least, true, top);
        if (min_p > 0.0f) floor_z = top + logf(min_p);
    }
    for (;;) {
        Candidate best = 0;
        if (greedy) {
            each_token<AHEAD>(row, n, inverse, [&](int v, float z) { best = max(best, candidate(z, v)); });
        } else {
            for (int v = 4 * (blocks.rank * WG + threadIdx.x); v < n; v += 4 * CLUSTER * WG) {
                float z[4];
                bool in[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    z[i] = row[min(v + i, n - 1)] * inverse;
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
            unsigned more = float_key(row[token] * inverse) + 1;
            float mass = measure(blocks, row, n, inverse, more, true, top);  // of the tokens more likely than the chosen one
            if (mass > 0.0f && mass >= wanted) {
                least = more;
                continue;
            }
        }
        if (threadIdx.x == 0 && blocks.rank == 0) out[r] = token;
        return;
    }
}
