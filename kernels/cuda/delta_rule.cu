// delta_rule, token by token, on states that stay in registers from a sequence's first token of the step to its last: memory is read
// and written once. A state is [HEADS][D_V][D_K]. A block has COLUMNS columns of a head, a warp four of them, and a lane the same
// elements of each, so that all sums of a token are found at once, by exchanges within a warp.
//
// With the state S before a token, both Sᵀk and Sᵀq are found first; S becomes decay * S + k dᵀ with d = strength * (v - decay * Sᵀk),
// and the result is decay * Sᵀq + (k · q) * d. BATCH tokens at a time have their q and k normalised, by all warps, for all warps. Of a
// sequence's only token in the step, each warp does that itself, so that none waits for others; but with ALIKE, where all tokens have to
// get the same bits.
#define EACH 4 /* columns of a warp */
#define WARPS (COLUMNS / EACH)
#define VECTORS ((D_K + 4 * WARP - 1) / (4 * WARP)) /* of a column, in each lane */
#define KEYS (K_HEADS * D_K)
#define WIDTH (2 * KEYS + HEADS * D_V)

__device__ __forceinline__ float dot(float4 a, float4 b) { return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w); }

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
delta_rule(const int *step, int seq_begin, int state_from, int state_to, const float *qkv, const float *gates, float *state,
           float *out, float eps) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, h = blockIdx.y, s = blockIdx.z;
    int tile = blockIdx.x * COLUMNS, column = tile + warp * EACH, key_head = TILED ? h % K_HEADS : h / (HEADS / K_HEADS);
    bool has_columns = column < D_V;
    start_dependents();
    if (s >= STEP_SEQS(step)) return;
    int first = step[seq_begin + s], end = step[seq_begin + s + 1];
#ifdef MIN_TOKENS  // sequences of at least so many tokens of the step are for delta_chunks
    if (end - first >= MIN_TOKENS) {
        wait_for_before();
        return;
    }
#endif
    int to = step[state_to + s], from = STEP_DONE(step) ? to : step[state_from + s];
    auto place = [&](int entry, int c) { return (float4 *)(state + (((size_t)entry * HEADS + h) * D_V + column + c) * D_K); };
    float4 held[EACH][VECTORS];
#pragma unroll
    for (int c = 0; c < EACH; c++) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            bool there = from >= 0 && has_columns && lane + i * WARP < D_K / 4;
            held[c][i] = there ? place(from, c)[lane + i * WARP] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    wait_for_before();
    // A token's q and k, normalised; returns their product.
    auto normalised = [&](const float *row, float4(&q)[VECTORS], float4(&k)[VECTORS]) {
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            q[i] = vector_or_zero(row + key_head * D_K, lane + i * WARP, D_K);
            k[i] = vector_or_zero(row + KEYS + key_head * D_K, lane + i * WARP, D_K);
            qq += squares(q[i]), kk += squares(k[i]);
        }
        float of_q = 1.0f / sqrtf(warp_reduce<Sum>(qq) + eps) / sqrtf((float)D_K), of_k = 1.0f / sqrtf(warp_reduce<Sum>(kk) + eps);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            q[i] = times(q[i], of_q), k[i] = times(k[i], of_k);
            qk += dot(q[i], k[i]);
        }
        return warp_reduce<Sum>(qk);
    };
    int own = lane / EACH % EACH;  // the column of which a lane has a result
    auto go_on = [&](int token, const float4(&q)[VECTORS], const float4(&k)[VECTORS], float product, float decay, float strength, float value) {
        float sums[2 * EACH] = {};  // Sᵀk, then Sᵀq
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
#pragma unroll
            for (int c = 0; c < EACH; c++) sums[c] += dot(held[c][i], k[i]), sums[EACH + c] += dot(held[c][i], q[i]);
        }
        // Each exchange adds what two lanes have and leaves each with half of the sums. Lane 4c has the first of column c, 16 + 4c
        // the second.
#pragma unroll
        for (int half = EACH, apart = WARP / 2; apart > 0; apart /= 2, half /= 2) {
            bool high = lane & apart;
            if (half == 0) {
                sums[0] += __shfl_xor_sync(FULL, sums[0], apart);
                continue;
            }
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (i >= half) break;
                float mine = high ? sums[i + half] : sums[i], other = high ? sums[i] : sums[i + half];
                sums[i] = mine + __shfl_xor_sync(FULL, other, apart);
            }
        }
        float found = __shfl_sync(FULL, sums[0], EACH * own), d = strength * (value - decay * found);
        if (lane >= WARP / 2 && lane % EACH == 0) out[((size_t)token * HEADS + h) * D_V + column + own] = decay * sums[0] + product * d;
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            float change = __shfl_sync(FULL, d, EACH * c);
#pragma unroll
            for (int i = 0; i < VECTORS; i++) {
                float4 old = times(held[c][i], decay), add = times(k[i], change);
                held[c][i] = make_float4(old.x + add.x, old.y + add.y, old.z + add.z, old.w + add.w);
            }
        }
    };
    if (BATCH == 1 || (!ALIKE && end - first == 1)) {
        if (!has_columns) return;
        const float *row = qkv + (size_t)first * WIDTH, *gate = gates + (size_t)first * 2 * HEADS;
        float value = row[2 * KEYS + h * D_V + column + own], decay = gate[h], strength = gate[HEADS + h];
        float4 q[VECTORS], k[VECTORS];
        float product = normalised(row, q, k);
        go_on(first, q, k, product, expf(decay), strength, value);
    }
#if BATCH > 1
    else {
        __shared__ __align__(16) float4 queries[BATCH][VECTORS * WARP], keys[BATCH][VECTORS * WARP];
        __shared__ float values[BATCH][COLUMNS], products[BATCH], decays[BATCH], strengths[BATCH];
        for (int begin = first; begin < end; begin += BATCH) {
            int count = min(BATCH, end - begin);
            __syncthreads();
            for (int t = warp; t < count; t += WARPS) {
                const float *row = qkv + (size_t)(begin + t) * WIDTH, *gate = gates + (size_t)(begin + t) * 2 * HEADS;
                float4 q[VECTORS], k[VECTORS];
                float product = normalised(row, q, k);
#pragma unroll
                for (int i = 0; i < VECTORS; i++) queries[t][lane + i * WARP] = q[i], keys[t][lane + i * WARP] = k[i];
                for (int c = lane; c < COLUMNS; c += WARP) values[t][c] = tile + c < D_V ? row[2 * KEYS + h * D_V + tile + c] : 0.0f;
                if (lane == 0) products[t] = product, decays[t] = expf(gate[h]), strengths[t] = gate[HEADS + h];
            }
            __syncthreads();
            if (!has_columns) continue;
            for (int t = 0; t < count; t++) {
                float4 q[VECTORS], k[VECTORS];
#pragma unroll
                for (int i = 0; i < VECTORS; i++) q[i] = queries[t][lane + i * WARP], k[i] = keys[t][lane + i * WARP];
                go_on(begin + t, q, k, products[t], decays[t], strengths[t], values[t][warp * EACH + own]);
            }
        }
        if (!has_columns) return;
    }
#endif
#pragma unroll
    for (int c = 0; c < EACH; c++) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (lane + i * WARP < D_K / 4) place(to, c)[lane + i * WARP] = held[c][i];
        }
    }
}
