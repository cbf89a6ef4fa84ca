// Products of rows with the matrices of the experts that they are routed to, on the tensor cores: a tile of expert_tiles, 8 * NT pairs of
// token and expert at most, with BM rows of the expert's matrices a block. COLS is a multiple of 256, and a row has one scale.
//
// The rows of x are in shared memory as a whole. A warp has 16 * MT rows of codes, 16 bytes a thread as they lie, of which DEPTH steps of
// 256 columns are in registers or on their way there. As in ternary_decode, the activations follow the order of K that this gives.
#include "expert.cuh"
#define WARPS 8
#define THREADS (WARPS * WARP)
#define BM (WARPS * MT * 16)
#define STEPS (COLS / 256)
#define TILE (8 * NT)
#define CHAINS (MT * NT < 4 ? 4 : 1) /* separate sums, so that no product waits for the one before */

// `per`: pairs that share a row of x and its scale. Results of a pair begin at `first` of its `columns`.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
expert_mma(const int *step, const signed char *x, const float *scale, const uint4 *codes, const unit_t *units, const int *order,
           const int *tiles, float *out, int per, int rows, int parts, int first, int columns) {
    extern __shared__ __align__(16) signed char x_shared[];  // [TILE][STRIDE]
    __shared__ int pairs[TILE];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = blockIdx.x * BM + warp * MT * 16, total = rows * parts;
    start_dependents();
    wait_for_before();
    int count = tiles[3 * blockIdx.y + 2];
    if (count == 0) return;  // nobody wrote the rest of the tile
    int expert = tiles[3 * blockIdx.y], begin = tiles[3 * blockIdx.y + 1];
    const uint4 *from[MT][2];
    uint4 code[DEPTH][MT][2];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int n = min(n0 + i / 2 * 16 + i % 2 * 8 + group, total - 1);
        from[i / 2][i % 2] = codes + matrix_row(n, expert, rows) * (COLS / 64) + quarter;
    }
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) code[d][i / 2][i % 2] = stream(from[i / 2][i % 2] + min(d, STEPS - 1) * 4);
    }
    if (threadIdx.x < TILE) pairs[threadIdx.x] = order[begin + min((int)threadIdx.x, count - 1)];
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * (COLS / 16); i += THREADS) {
        int t = i / (COLS / 16), unit = i % (COLS / 16);
        copy_async(x_shared + t * STRIDE + place(unit) * 16, x + (t < count ? (size_t)(pairs[t] / per) * COLS + unit * 16 : 0), t < count);
    }
    asm volatile("cp.async.wait_all;");
    __syncthreads();

    int sums[CHAINS][MT][NT][4] = {};
    const signed char *at = x_shared + group * STRIDE + quarter * 16;
#pragma unroll 1
    for (int s0 = 0; s0 < STEPS; s0 += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (STEPS % DEPTH && s0 + d >= STEPS) break;
            uint4 now[MT][2];
#pragma unroll
            for (int i = 0; i < 2 * MT; i++) now[i / 2][i % 2] = code[d][i / 2][i % 2];
            if (s0 + d + DEPTH < STEPS) {
#pragma unroll
                for (int i = 0; i < 2 * MT; i++) code[d][i / 2][i % 2] = stream(from[i / 2][i % 2] + (s0 + d + DEPTH) * 4);
            }
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
                uint4 a[MT][2];
#pragma unroll
                for (int i = 0; i < 2 * MT; i++) a[i / 2][i % 2] = pairs_at(now[i / 2][i % 2], 2 * plane);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint4 v = *(const uint4 *)(at + n * 8 * STRIDE + (s0 + d) * 256 + plane * 64);
#pragma unroll
                    for (int t = 0; t < MT; t++) {
                        mma(sums[2 * plane % CHAINS][t][n], a[t][0].x, a[t][1].x, a[t][0].y, a[t][1].y, v.x, v.y);
                        mma(sums[(2 * plane + 1) % CHAINS][t][n], a[t][0].z, a[t][1].z, a[t][0].w, a[t][1].w, v.z, v.w);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int n = n0 + i / 2 * 16 + i % 2 * 8 + group;
        if (n >= total) continue;
        unit_t unit = units[matrix_row(n, expert, rows)];
#pragma unroll
        for (int j = 0; j < 2 * NT; j++) {
            int t = j / 2 * 8 + quarter * 2 + j % 2, sum = 0;
            if (t >= count) continue;
#pragma unroll
            for (int c = 0; c < CHAINS; c++) sum += sums[c][i / 2][j / 2][i % 2 * 2 + j % 2];
            out[(size_t)pairs[t] * columns + first + n] = value_of(sum, scale[pairs[t] / per], unit);
        }
    }
}
