// One block chooses the token of one row. Thresholds of top-k and top-p are found by bisection over the order-preserving
// integer form of floats, so that no sort is needed and ties are all kept.

#include "draw.cuh"

// Calls f(v, z) for each of this thread's tokens, with AHEAD loads in flight and as many copies of f compiled.
template <int AHEAD, class F>
__device__ __forceinline__ void each_token(const float *row, int n, float inverse, F f) {
    if (n % 4 == 0) {
#pragma unroll AHEAD
        for (int k = threadIdx.x; k < n / 4; k += WG) {
            float4 z = times(((const float4 *)row)[k], inverse);
            f(4 * k, z.x);
            f(4 * k + 1, z.y);
            f(4 * k + 2, z.z);
            f(4 * k + 3, z.w);
        }
    } else {
        for (int v = threadIdx.x; v < n; v += WG) f(v, row[v] * inverse);
    }
}

// Not inlined, as it is large (many loads in flight) and called three times.
// Over the tokens whose key is at least `least`: how many there are, or the sum of e^(z - top).
__device__ __noinline__ float measure(const float *row, int n, float inverse, unsigned least, bool mass, float top) {
    float sum = 0.0f;
    each_token<8>(row, n, inverse, [&](int, float z) {
        if (float_key(z) >= least) sum += mass ? expf(z - top) : 1.0f;
    });
    return block_reduce<Sum>(sum);
}

// The greatest key at which the measure still reaches `wanted`.
__device__ __noinline__ unsigned threshold(const float *row, int n, float inverse, float wanted, bool mass, float top, unsigned least) {
    unsigned low = least, high = 0xFFFFFFFFu;
    while (low < high) {
        unsigned middle = low + (high - low) / 2 + 1;
        if (measure(row, n, inverse, middle, mass, top) >= wanted) low = middle;
        else high = middle - 1;
    }
    return low;
}

extern "C" __global__ void sample(const int *step, int rows, int temperatures, int top_ks, int top_ps, int min_ps,
                                  int seeds_lo, int seeds_hi, int token_seq, int seq_begin, int seq_len,
                                  const float *logits, int *out, int n) {
    __shared__ float best_value[WG];
    __shared__ int best_index[WG];
    int r = blockIdx.x, lane = threadIdx.x;
    start_dependents();
    wait_for_before();
    if (r >= STEP_ROWS(step)) return;
    const float *row = logits + (size_t)r * n;
    float temperature = __int_as_float(step[temperatures + r]);
    bool greedy = temperature == 0.0f;
    float inverse = greedy ? 1.0f : 1.0f / temperature;
    unsigned least = 0, position = 0;
    float floor_z = -INFINITY_F;
    if (!greedy) {
        position = token_position(step, token_seq, seq_begin, seq_len, step[rows + r]) + 1;
        float top = -INFINITY_F;
        each_token<8>(row, n, inverse, [&](int, float z) { top = fmaxf(top, z); });
        top = block_reduce<Max>(top);
        int top_k = step[top_ks + r];
        float top_p = __int_as_float(step[top_ps + r]), min_p = __int_as_float(step[min_ps + r]);
        if (top_k > 0 && top_k < n) least = threshold(row, n, inverse, top_k, false, top, 0);
        if (top_p < 1.0f) {
            float total = measure(row, n, inverse, least, true, top);
            least = threshold(row, n, inverse, top_p * total, true, top, least);
        }
        if (min_p > 0.0f) floor_z = top + logf(min_p);
    }
    float best = -INFINITY_F;
    int index = n;
    auto offer = [&](int v, float z) {
        if (no_number(z)) index = -1;
        else if (index >= 0 && (z > best || index == n)) {  // tokens come in rising order
            best = z;
            index = v;
        }
    };
    if (greedy) each_token<8>(row, n, inverse, offer);
    else each_token<1>(row, n, inverse, [&](int v, float z) {
        if (!no_number(z) && (float_key(z) < least || z < floor_z)) return;
        offer(v, z + gumbel(step[seeds_lo + r], step[seeds_hi + r], v, position));
    });
    best_value[lane] = best;
    best_index[lane] = index;
    for (int half = WG / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
            float other = best_value[lane + half];
            int other_index = best_index[lane + half], mine = best_index[lane];
            if (mine >= 0 && other_index < n && (other_index < 0 || mine == n || other > best_value[lane] ||
                                                 (other == best_value[lane] && other_index < mine))) {
                best_value[lane] = other;
                best_index[lane] = other_index;
            }
        }
    }
    if (lane == 0) out[r] = best_index[0];
}
