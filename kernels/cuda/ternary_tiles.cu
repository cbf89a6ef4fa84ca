#include "tiles.cuh"
// ternary_matmul for many tokens on Hopper's asynchronous tensor cores (wgmma): tiles of BM rows of W by BN tokens, 64 rows a
// warpgroup. One thread has the copy engine fill a ring of STAGES tiles of 128 of K in shared memory. The warpgroups wait for one
// another only through the ring, so that one expands its codes while another multiplies. A block takes tile after tile.
//
// W is expanded in registers, from its codes as they lie (32 bytes a row and tile): the word at byte 4j of a row holds, at each of
// the four bit pairs, 4 neighbours of K, so that a bit pair of words q and q + 4 is thread q's part of a step of K = 32. The
// activations are read from shared memory, 128 bytes a token in the 128-byte swizzle. The codes are 0, 1, 2 for -1, 0, 1: `sums`,
// of each token's activations, is subtracted.
//
// For at least LAG + 1 stages of K. GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
#define LAG 2 /* stages by which the fastest warpgroup may lead the slowest without waiting */
#define THREADS (2 * BM)
#define BATCH (BN == 160 ? 2 : NT % 4 == 0 ? 4 : 2) /* as many at a time as there are registers for */

#define NAMES80 NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define A_AND_X : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x)

// acc += a (64 rows of W by 32 of K, in registers) times the tokens that `x` describes.
__device__ __forceinline__ void multiply(int (&acc)[NT][4], const unsigned (&a)[4], unsigned long long x) {
#if BN == 160
    asm volatile("wgmma.mma_async.sync.aligned.m64n160k32.s32.u8.s8 {" NAMES80 "}, {%80,%81,%82,%83}, %84, 1;"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12), ACC4(16) A_AND_X);
#else
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 {" NAMES64 "}, {%64,%65,%66,%67}, %68, 1;"
                 : ACC4(0), ACC4(4), ACC4(8), ACC4(12) A_AND_X);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ternary_tiles(const int *step, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes, const float *scale,
              const int *sums, const unit_t *w_scale, float *out, int rows) {
    extern __shared__ unsigned char unaligned[];  // the ring, and 1024 bytes to align it
    __shared__ Barrier full[STAGES], empty[STAGES];
    unsigned char *ring = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024;
    int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int tokens = STEP_TOKENS(step), row_tiles = (rows + BM - 1) / BM, tiles = row_tiles * ((tokens + BN - 1) / BN);
    if (blockIdx.x >= tiles) return;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + s, 1), barrier_init(empty + s, ARRIVALS(THREADS / WARP));
        barriers_ready();
    }
    __syncthreads();
    start_dependents();

    auto fetch_codes = [&](int stage, int tile, int k) {
        unsigned char *to = ring + stage * STAGE + BN * 128;
        int n0 = tile % row_tiles * BM, at = k * 32;
        barrier_expect(full + stage, STAGE);
#if GLU
        copy_tile(to, &codes, at, n0 / 2, full + stage);
        copy_tile(to + BM * 16, &codes, at, (rows + n0) / 2, full + stage);
#else
        copy_tile(to, &codes, at, n0, full + stage);
#endif
    };
    auto fetch_x = [&](int stage, int tile, int k) {
        copy_tile(ring + stage * STAGE, &x, k * 128, tile / row_tiles * BN, full + stage);
    };
    int filled = min(STAGES, BLOCKS), fill_tile = blockIdx.x, fill_k = filled, fill_stage = filled % STAGES, fill_parity = filled / STAGES ^ 1;
    if (threadIdx.x == 0) {
        for (int k = 0; k < filled; k++) fetch_codes(k, fill_tile, k);
        wait_for_before();
        for (int k = 0; k < filled; k++) fetch_x(k, fill_tile, k);
    }
    auto fill = [&] {  // the next stage, once all have left it
        if (fill_k == BLOCKS) fill_k = 0, fill_tile += gridDim.x;
        if (fill_tile < tiles) {
            barrier_wait(empty + fill_stage, fill_parity);
            fetch_codes(fill_stage, fill_tile, fill_k);
            fetch_x(fill_stage, fill_tile, fill_k++);
            if (++fill_stage == STAGES) fill_stage = 0, fill_parity ^= 1;
        }
    };
    wait_for_before();

    int stage = 0, parity = 0, used = 0;
    int row = warp * 16 + group, swap = group / 4 * 16;  // the swizzle of rows of 32 bytes
    int low = (GLU ? warp * 8 + group : row) * 32 + quarter * 4, high = low + (GLU ? BM * 16 : 256);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        int acc[NT][4] = {};
        for (int k = 0; k < BLOCKS; k++) {
            const unsigned char *from = ring + stage * STAGE, *code = from + BN * 128;
            barrier_wait(full + stage, parity);
            unsigned words[4] = {*(const unsigned *)(code + low + swap), *(const unsigned *)(code + high + swap),
                                 *(const unsigned *)(code + low + (16 ^ swap)), *(const unsigned *)(code + high + (16 ^ swap))};
            products_wait<0>();  // of the stage before, which all lanes have read
            if (k > 0) warp_arrive(empty + (stage ? stage : STAGES) - 1, lane);
            unsigned a[4][4];
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
#pragma unroll
                for (int i = 0; i < 4; i++) a[plane][i] = words[i] >> (6 - 2 * plane) & 0x03030303u;
            }
            unsigned long long tokens_at = operand(from);
            products_begin();
#pragma unroll
            for (int plane = 0; plane < 4; plane++) multiply(acc, a[plane], tokens_at + 2 * plane);
            products_commit();
            if (threadIdx.x == 0 && used++ >= LAG) fill();
            __syncwarp();
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        products_wait<0>();
#pragma unroll
        for (int n = 0; n < NT; n++) asm volatile("" : ACC(n));
        warp_arrive(empty + (stage ? stage : STAGES) - 1, lane);

        int n0 = tile % row_tiles * BM, m0 = tile / row_tiles * BN, last = tokens - 1 - m0, width = GLU ? rows / 2 : rows;
        asm volatile("" : "+r"(width));  // or products with it would be computed before all tiles, and kept
        int n_low = GLU ? n0 / 2 + warp * 8 + group : n0 + row, n_high = n_low + (GLU ? width : 8);
        bool low_there = n_low < width, high_there = n_high < rows;
        int from_low = low_there ? n_low : 0, from_high = high_there ? n_high : 0;
        float scale_low = to_float(w_scale[from_low]), scale_high = to_float(w_scale[from_high]);
        float *to = out + (size_t)m0 * width;
        // All loads of a batch come before its first store, which they could not overtake.
#pragma unroll
        for (int start = 0; start < NT; start += BATCH) {
            float2 v[BATCH * 2];
#pragma unroll
            for (int i = 0; i < BATCH * 2; i++) {
                int n = start + i / 2, m = min(n * 8 + quarter * 2 + i % 2, last);
                int sum = sums[m0 + m];
                float s = scale[m0 + m];
                v[i] = make_float2(dequantize(acc[n][i % 2] - sum, s, scale_low), dequantize(acc[n][2 + i % 2] - sum, s, scale_high));
#if ADD  // the contract rounds this sum separately
                v[i] = make_float2(__fadd_rn(to[m * width + from_low], v[i].x), __fadd_rn(to[m * width + from_high], v[i].y));
#endif
            }
#pragma unroll
            for (int i = 0; i < BATCH * 2; i++) {
                int m = (start + i / 2) * 8 + quarter * 2 + i % 2;
                if (m > last) continue;
#if GLU
                if (low_there) to[m * width + n_low] = act(v[i].x) * v[i].y;
#else
                if (low_there) to[m * width + n_low] = v[i].x;
                if (high_there) to[m * width + n_high] = v[i].y;
#endif
            }
        }
    }
}
