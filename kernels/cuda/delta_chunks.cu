// delta_rule in chunks, on the tensor cores: the sequences of which the step has many tokens. A warp has 16 columns of a head's state
// through all of them, transposed, in registers. A chunk with the state S before it is, with what delta_prepare has found:
//   D = solve (V - (K S) e^c / |k|),   out = (Q S) e^c / |q| + weigh D,   S <- e^(c_last) S + Kᵀ (D e^(c_last - c) / |k|)
// All products are computed transposed, so that results are operands of the next ones as they are.
#include "delta_chunks.cuh"
#define WARPS 4
#define TILES (CHUNK / 8) /* of tokens */
#define STEPS (D_K / 8)
#define STAGE (2 * CHUNK * D_K + PAIR + 4 * CHUNK)

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
delta_chunks(const int *step, int seq_begin, int state_from, int state_to, const float *qkv, const float *matrices,
             const float *factors, float *state, float *out) {
    extern __shared__ __align__(128) float ring[];  // [STAGES]: q, k, solve, weigh, factors
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int h = blockIdx.y, s = blockIdx.z, column = (blockIdx.x * WARPS + warp) * 16 + group;  // and column + 8
    int key_head = TILED ? h % K_HEADS : h / (HEADS / K_HEADS);
    start_dependents();
    wait_for_before();
    if (s >= STEP_SEQS(step)) return;
    int begin = step[seq_begin + s], end = step[seq_begin + s + 1];
    if (!in_chunks(begin, end)) return;
    int chunks = (end - begin + CHUNK - 1) / CHUNK;
    size_t pair = (size_t)(begin / CHUNK + s) * HEADS + h;
    auto fetch = [&](int i) {
        float *to = ring + i % STAGES * STAGE, *rest = to + 2 * CHUNK * D_K;
        size_t at = pair + (size_t)i * HEADS;
        for (int j = threadIdx.x * 4; j < PAIR; j += WARPS * WARP * 4) copy_async(rest + j, matrices + at * PAIR + j, true);
        if (threadIdx.x < CHUNK) copy_async(rest + PAIR + threadIdx.x * 4, factors + at * 4 * CHUNK + threadIdx.x * 4, true);
        copy_heads<WARPS * WARP>(to, qkv, key_head, begin + i * CHUNK, min(CHUNK, end - begin - i * CHUNK));
    };
    fetch(0);
    int to = step[state_to + s], from = STEP_DONE(step) ? to : step[state_from + s];
    auto place = [&](int entry, int half) { return state + (((size_t)entry * HEADS + h) * D_V + column + 8 * half) * D_K + 2 * quarter; };
    bool has[2] = {column < D_V, column + 8 < D_V};
    float held[STEPS][4];
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 v = from >= 0 && has[half] ? *(const float2 *)(place(from, half) + 8 * k) : make_float2(0.0f, 0.0f);
            held[k][2 * half] = v.x, held[k][2 * half + 1] = v.y;
        }
    }
    int turn = swizzle(group);
    for (int chunk = 0; chunk < chunks; chunk++) {
        int first = begin + chunk * CHUNK, count = min(CHUNK, end - first);
        if (STAGES > 1) {
            if (chunk + 1 < chunks) fetch(chunk + 1);
            else copies_commit();
        }
        copies_wait<STAGES - 1>();
        __syncthreads();
        const float *queries = ring + chunk % STAGES * STAGE, *keys = queries + CHUNK * D_K, *solve = keys + CHUNK * D_K;
        const float *weigh = solve + CHUNK * CHUNK, *factor = weigh + CHUNK * CHUNK;
        auto pair_at = [&](const float *rows, int width, int n, int k) {
            return *(const float2 *)(rows + (8 * n + group) * width + (8 * k ^ turn) + 2 * quarter);
        };
        auto token = [&](int n, int e) { return 8 * n + 2 * quarter + e % 2; };  // of an element of a tile
        float result[TILES][4], change[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
#pragma unroll
            for (int i = n; i < n + 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *v = qkv + (size_t)(first + token(i, e)) * WIDTH + 2 * KEYS + h * D_V + column + e / 2 * 8;
                    change[i][e] = token(i, e) < count && has[e / 2] ? *v : 0.0f;
                }
            }
            Sums3 of_k[2] = {}, of_q[2] = {};
#pragma unroll
            for (int k = 0; k < STEPS * 4; k++) asm volatile("" : "+f"(held[k / 4][k % 4]));  // else all their parts are kept, and spilled
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                SplitTile tile = split_tile(held[k]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    of_k[i].add(tile, pair_at(keys, D_K, n + i, k));
                    of_q[i].add(tile, pair_at(queries, D_K, n + i, k));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    change[n + i][e] -= factor[token(n + i, e)] * of_k[i].of(e);
                    result[n + i][e] = factor[CHUNK + token(n + i, e)] * of_q[i].of(e);
                }
            }
        }
        // Products with a lower triangular matrix: tokens up to each token.
        auto triangular = [&](const float *matrix, const float(&of)[TILES][4], float(&sums)[TILES][4]) {
#pragma unroll
            for (int n = 0; n < TILES; n += 2) {
                Sums3 sum[2] = {};
#pragma unroll
                for (int k = 0; k < n + 2; k++) {
                    SplitTile tile = split_tile(of[k]);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        if (k <= n + i) sum[i].add(tile, pair_at(matrix, CHUNK, n + i, k));
                    }
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[n + i][e] += sum[i].of(e);
                }
            }
        };
        float values[TILES][4] = {};
        triangular(solve, change, values);
        triangular(weigh, values, result);
        SplitTile tiles[TILES];
#pragma unroll
        for (int n = 0; n < TILES; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (token(n, e) < count && has[e / 2])
                    out[((size_t)(first + token(n, e)) * HEADS + h) * D_V + column + e / 2 * 8] = result[n][e];
                values[n][e] *= factor[2 * CHUNK + token(n, e)];
            }
            tiles[n] = split_tile(values[n]);
        }
        float decay = factor[3 * CHUNK];
        int even = swizzle(2 * quarter), odd = swizzle(2 * quarter + 1);
#pragma unroll
        for (int k = 0; k < STEPS; k += 2) {
            Sums3 sum[2] = {};
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float *row = keys + (8 * n + 2 * quarter) * D_K + group;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    int at = 8 * (k + i);
                    sum[i].add(tiles[n], make_float2(row[at ^ even], row[D_K + (at ^ odd)]));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) held[k + i][e] = held[k + i][e] * decay + sum[i].of(e);
            }
        }
        __syncthreads();
        if (STAGES == 1 && chunk + 1 < chunks) fetch(chunk + 1);
    }
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (has[half]) *(float2 *)(place(to, half) + 8 * k) = make_float2(held[k][2 * half], held[k][2 * half + 1]);
        }
    }
}
