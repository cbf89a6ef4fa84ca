// delta_rule in chunks, on the tensor cores: the sequences of which the step has many tokens. PARTS warps share 16 columns of a head's
// state through all of them. A chunk with the state S before it is, with what delta_prepare has found:
//   D = solve (V - (K S) e^c / |k|),   out = (Q S) e^c / |q| + weigh D,   S <- e^(c_last) S + Kᵀ (D e^(c_last - c) / |k|)
// All products are computed transposed, so that results are operands of the next ones as they are. Each warp has two tiles of 8 tokens,
// one from each end, so that all have as much of the triangular matrices; and of the state's rows its share, in registers. What the
// others need of these lies in shared memory: V - K S and D in place of the chunk's q, the state in place of its matrices.
#include "delta_chunks.cuh"
#define COLUMNS 64
#define PARTS 4
#define WARPS (COLUMNS / 16 * PARTS)
#define TILES (CHUNK / 8) /* of tokens */
#define STEPS (D_K / 8)
#define OWN (STEPS / PARTS)
#define ROOM (2 * COLUMNS * CHUNK)                              /* for what takes the place of q */
#define SKIPPED (ROOM > CHUNK * D_K ? ROOM - CHUNK * D_K : 0) /* before q, where that is shorter */
#define HEAD_ROOM (SKIPPED + 2 * CHUNK * D_K)
#define STAGE (HEAD_ROOM + PAIR + 4 * CHUNK)

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
delta_chunks(const int *step, int seq_begin, int state_from, int state_to, const float *qkv, const float *matrices,
             const float *factors, float *state, float *out) {
    extern __shared__ __align__(128) float ring[];  // [STAGES]: q, k, solve, weigh, factors
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4, part = warp % PARTS;
    int h = blockIdx.y, s = blockIdx.z, local = warp / PARTS * 16 + group, column = blockIdx.x * COLUMNS + local;  // and column + 8
    int key_head = TILED ? h % K_HEADS : h / (HEADS / K_HEADS);
    start_dependents();
    if (s >= STEP_SEQS(step)) return;
    wait_for_before();
    int begin = step[seq_begin + s], end = step[seq_begin + s + 1];
    if (!in_chunks(begin, end)) return;
    int chunks = (end - begin + CHUNK - 1) / CHUNK;
    size_t pair = (size_t)(begin / CHUNK + s) * HEADS + h;
    auto stage_of = [&](int i) { return ring + (i + STAGES) % STAGES * STAGE; };
    auto fetch_heads = [&](int i) {
        float *to = stage_of(i);
        if (threadIdx.x < CHUNK) copy_async(to + HEAD_ROOM + PAIR + threadIdx.x * 4, factors + (pair + (size_t)i * HEADS) * 4 * CHUNK + threadIdx.x * 4, true);
        copy_heads<WARPS * WARP>(to + SKIPPED, qkv, key_head, begin + i * CHUNK, min(CHUNK, end - begin - i * CHUNK));
    };
    auto fetch_matrices = [&](int i) {
        float *to = stage_of(i) + HEAD_ROOM;
        const float *from = matrices + (pair + (size_t)i * HEADS) * PAIR;
        for (int j = threadIdx.x * 4; j < PAIR; j += WARPS * WARP * 4) copy_async(to + j, from + j, true);
        copies_commit();
    };
    fetch_heads(0);
    if (STAGES > 1) fetch_matrices(0);
    int to = step[state_to + s], from = STEP_DONE(step) ? to : step[state_from + s], turn = swizzle(group);
    auto place = [&](int entry, int half) { return state + (((size_t)entry * HEADS + h) * D_V + column + 8 * half) * D_K + 8 * OWN * part + 2 * quarter; };
    // Elements of two rows of shared memory, local and local + 8, that this thread has of a tile.
    auto at = [&](float *rows, int width, int tile, int half) { return (float2 *)(rows + (local + 8 * half) * width + (8 * tile ^ turn) + 2 * quarter); };
    auto split_at = [&](float *rows, int width, int tile) {
        float2 low = *at(rows, width, tile, 0), high = *at(rows, width, tile, 1);
        return split_tile({low.x, low.y, high.x, high.y});
    };
    bool has[2] = {column < D_V, column + 8 < D_V};
    float held[OWN][4];
    auto put_state = [&](float *rows) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) *at(rows, D_K, part * OWN + i, half) = make_float2(held[i][2 * half], held[i][2 * half + 1]);
        }
    };
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 v = from >= 0 && has[half] ? *(const float2 *)(place(from, half) + 8 * i) : make_float2(0.0f, 0.0f);
            held[i][2 * half] = v.x, held[i][2 * half + 1] = v.y;
        }
    }
    put_state(stage_of(-1) + HEAD_ROOM);
    const int tiles[2] = {part, TILES - 1 - part};
    auto token = [&](int i, int e) { return 8 * tiles[i] + 2 * quarter + e % 2; };  // of an element of this warp's tile i
    for (int chunk = 0; chunk < chunks; chunk++) {
        int first = begin + chunk * CHUNK, count = min(CHUNK, end - first);
        float *change_rows = stage_of(chunk), *value_rows = change_rows + COLUMNS * CHUNK, *before = stage_of(chunk - 1) + HEAD_ROOM;
        float *queries = change_rows + SKIPPED, *keys = queries + CHUNK * D_K, *solve = keys + CHUNK * D_K, *weigh = solve + CHUNK * CHUNK;
        const float *factor = weigh + CHUNK * CHUNK;
        auto pair_at = [&](const float *rows, int width, int n, int k) {
            return *(const float2 *)(rows + (8 * n + group) * width + (8 * k ^ turn) + 2 * quarter);
        };
        float change[2][4], result[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float *v = qkv + (size_t)(first + token(i, e)) * WIDTH + 2 * KEYS + h * D_V + column + e / 2 * 8;
                change[i][e] = token(i, e) < count && has[e / 2] ? *v : 0.0f;
            }
        }
        copies_wait<0>();
        __syncthreads();
        {
            Sums3 of_k[2] = {}, of_q[2] = {};
#pragma unroll
            for (int k = 0; k < STEPS; k++) {
                SplitTile tile = split_at(before, D_K, k);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    of_k[i].add(tile, pair_at(keys, D_K, tiles[i], k));
                    of_q[i].add(tile, pair_at(queries, D_K, tiles[i], k));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    change[i][e] -= factor[token(i, e)] * of_k[i].of(e);
                    result[i][e] = factor[CHUNK + token(i, e)] * of_q[i].of(e);
                }
            }
        }
        __syncthreads();
        if (STAGES == 1) {
            fetch_matrices(chunk);
            copies_wait<0>();
            __syncthreads();
        } else if (chunk + 1 < chunks) {
            fetch_heads(chunk + 1);
            fetch_matrices(chunk + 1);
        }
        auto put_tiles = [&](float *rows, const float(&of)[2][4]) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int half = 0; half < 2; half++) *at(rows, CHUNK, tiles[i], half) = make_float2(of[i][2 * half], of[i][2 * half + 1]);
            }
            asm volatile("bar.sync %0, %1;" ::"r"(warp / PARTS + 1), "n"(PARTS * WARP) : "memory");  // the warps of these columns
        };
        // Products with a lower triangular matrix: tokens up to each token.
        auto triangular = [&](const float *matrix, float *rows, float(&sums)[2][4]) {
            Sums3 sum[2] = {};
#pragma unroll 2
            for (int k = 0; k <= tiles[1]; k++) {
                SplitTile tile = split_at(rows, CHUNK, k);
                if (k <= tiles[0]) sum[0].add(tile, pair_at(matrix, CHUNK, tiles[0], k));
                sum[1].add(tile, pair_at(matrix, CHUNK, tiles[1], k));
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) sums[i][e] += sum[i].of(e);
            }
        };
        put_tiles(change_rows, change);
        float values[2][4] = {};
        triangular(solve, change_rows, values);
        put_tiles(value_rows, values);
        triangular(weigh, value_rows, result);
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (token(i, e) < count && has[e / 2])
                    out[((size_t)(first + token(i, e)) * HEADS + h) * D_V + column + e / 2 * 8] = result[i][e];
            }
        }
        float decay = factor[3 * CHUNK];
        int even = swizzle(2 * quarter), odd = swizzle(2 * quarter + 1);
        {
            Sums3 sum[OWN] = {};
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                float2 low = *at(value_rows, CHUNK, n, 0), high = *at(value_rows, CHUNK, n, 1);
                float2 rest = *(const float2 *)(factor + 2 * CHUNK + 8 * n + 2 * quarter);
                SplitTile tile = split_tile({low.x * rest.x, low.y * rest.y, high.x * rest.x, high.y * rest.y});
                const float *row = keys + (8 * n + 2 * quarter) * D_K + group;
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    int k = 8 * (part * OWN + i);
                    sum[i].add(tile, make_float2(row[k ^ even], row[D_K + (k ^ odd)]));
                }
            }
#pragma unroll
            for (int i = 0; i < OWN; i++) {
#pragma unroll
                for (int e = 0; e < 4; e++) held[i][e] = held[i][e] * decay + sum[i].of(e);
            }
        }
        __syncthreads();
        put_state(solve);
        if (STAGES == 1 && chunk + 1 < chunks) fetch_heads(chunk + 1);
    }
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (has[half]) *(float2 *)(place(to, half) + 8 * i) = make_float2(held[i][2 * half], held[i][2 * half + 1]);
        }
    }
}
