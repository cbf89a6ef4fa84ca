// Scores of all rows of a compact head, roughly, for up to 8 rows of x, and for each of these the greatest key that its winner
// reaches for certain. A warp has 16 rows of the head at a time; it asks for the next ITERS * 64 bytes of each while it multiplies
// the last ones, on the tensor cores: u4 codes expanded to bytes, and for each row of x its high and its low bytes side by side.
#include "head.cuh"
#define STAGES (COLS / 128 / ITERS)
#define TILES ((2 * TOKENS + 7) / 8) /* of 8 columns: 4 rows of x */
#define PITCH (COLS + 16) /* so that two columns fall into different banks */

__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, 2)
head_score(const int *step, CHOICE_FIELDS, const unsigned char *head, const signed char *planes, const float4 *params,
           float *scores, unsigned *least, int rows) {
    extern __shared__ __align__(16) signed char columns[];  // [TILES * 8][PITCH]
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    const float2 *sizes = (const float2 *)(head + head_sizes_at(rows));
    int tile = blockIdx.x * WARPS + warp, tiles = (rows + 15) / 16;
    uint4 low[2][ITERS], high[2][ITERS];
    auto fetch = [&](int to, int t, int stage) {
        const uint4 *from = (const uint4 *)head + stage * ITERS * 4 + quarter;
#pragma unroll
        for (int i = 0; i < ITERS; i++) {
            low[to][i] = stream(from + (size_t)min(t * 16 + group, rows - 1) * (COLS / 32) + i * 4);
            high[to][i] = stream(from + (size_t)min(t * 16 + group + 8, rows - 1) * (COLS / 32) + i * 4);
        }
    };
    if (tile < tiles) fetch(0, tile, 0);
    start_dependents();
    wait_for_before();
    int count = STEP_ROWS(step);
    for (int i = threadIdx.x; i < TILES * 8 * (COLS / 16); i += WARPS * WARP) {
        int c = i / (COLS / 16), at = i % (COLS / 16) * 16;
        copy_async(columns + c * PITCH + at, planes + (c < 2 * count ? (size_t)c * COLS + at : 0), c < 2 * count);
    }
    float4 p[TILES];
    Choice choice[TILES];
    float greatest[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int r = min(t * 4 + quarter, count - 1);
        p[t] = params[r], choice[t] = head_choice(step, CHOICE_AT, r), greatest[t] = -INFINITY_F;
    }
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    for (; tile < tiles; tile += gridDim.x * WARPS) {
        int sums[TILES][4] = {};
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) {
            int next = tile + gridDim.x * WARPS, now = stage % 2;
            if (stage + 1 < STAGES) fetch(1 - now, tile, stage + 1);
            else if (next < tiles) fetch(1 - now, next, 0);
#pragma unroll
            for (int i = 0; i < ITERS; i++) {
                uint4 a = low[now][i], b = high[now][i];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    unsigned shift = 4 * half, mask = 0x0F0F0F0Fu;
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        const signed char *from = columns + (t * 8 + group) * PITCH + ((stage * ITERS + i) * 4 + quarter) * 32 + half * 16;
                        uint4 x = *(const uint4 *)from;
                        mma(sums[t], a.x >> shift & mask, b.x >> shift & mask, a.y >> shift & mask, b.y >> shift & mask, x.x, x.y);
                        mma(sums[t], a.z >> shift & mask, b.z >> shift & mask, a.w >> shift & mask, b.w >> shift & mask, x.z, x.w);
                    }
                }
            }
        }
        if (STAGES % 2) {  // the next tile's first codes are in the other half
#pragma unroll
            for (int i = 0; i < ITERS; i++) low[0][i] = low[1][i], high[0][i] = high[1][i];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int n = tile * 16 + group + 8 * h;
            if (n >= rows) continue;
            float2 size = sizes[n];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                int r = t * 4 + quarter;
                if (r >= count) continue;
                // The high bytes count 256 fold: below 2^31 for up to 4,096 columns.
                float sum = (float)(sums[t][2 * h] * 256 + sums[t][2 * h + 1]) - p[t].y;
                float score = sum * p[t].x * size.x, doubt = p[t].z * size.x + p[t].w * size.y;
                scores[(size_t)r * rows + n] = score;
                greatest[t] = fmaxf(greatest[t], head_key(choice[t], score - doubt, n));
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        for (int i = 4; i < WARP; i *= 2) greatest[t] = fmaxf(greatest[t], __shfl_xor_sync(FULL, greatest[t], i));
        if (group == 0 && t * 4 + quarter < count) atomicMax(least + t * 4 + quarter, float_key(greatest[t]));
    }
}
