// ternary_matmul for many tokens, on the tensor cores: BM rows of W by BN tokens a block, 128 of K at a time through a ring of
// STAGES tiles in shared memory that cp.async fills ahead.
//
// A tile of W is its codes as they lie, 32 bytes a row. A thread takes the words 2q and 2q + 1 of a row, one bit pair after the
// other (four neighbours of K each), so a step of K = 32 is one bit pair of all eight words, and the activations at the same
// places are 8 neighbouring bytes. The codes are 0, 1, 2 for -1, 0, 1: `sums`, of each token's activations, is subtracted.
// GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
// GROUP: columns of K that share a scale of a row (64, 128 or 256); 0: one scale for all. Codes are then two's complement, and the
// products of each group are added, times its scale, to f32 sums.
#define ROWS_WARPS (BM / 32)
#define TOKEN_WARPS (8 / ROWS_WARPS)
#define NT (BN / TOKEN_WARPS / 8)
#define THREADS 256
#define STAGES 4
#define X_PITCH 160 /* bytes: 128, and 32 so that the 8-byte loads of a warp fall into different banks */
#define W_PITCH 32
#define BLOCKS ((ROW_BYTES) / 32)
#if GROUP
#define A_TYPE "s8"
#define PAIRS(word, plane) ((word) << 2 * (plane) & 0xC0C0C0C0u) /* 64 times the weights */
#define SETS (GROUP == 64 ? 2 : 1)  /* groups of a tile, or the one of */
#define TILES (GROUP == 256 ? 2 : 1) /* so many tiles */
#define COUNT (COLS / GROUP)
#else
#define TILES 1
#define A_TYPE "u8"
#define PAIRS(word, plane) ((word) >> (6 - 2 * (plane)) & 0x03030303u)
#define SETS 1
#endif
#define STAGE (BN * X_PITCH + BM * W_PITCH)

__device__ __forceinline__ void mma(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32." A_TYPE ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
ternary_mma(const int *step, const signed char *x, const float *scale, const int *sums, const unsigned char *codes,
            const void *w_scale, float *out, int rows) {
    extern __shared__ __align__(16) unsigned char ring[];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int row0 = warp % ROWS_WARPS * 32, token0 = warp / ROWS_WARPS * (BN / TOKEN_WARPS);
    int n0 = blockIdx.x * BM, m0 = blockIdx.y * BN;
    auto weight_row = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 + (r % 16 < 8 ? 0 : rows / 2) : n0 + r; };
    auto weight_there = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 < rows / 2 : n0 + r < rows; };
    start_dependents();
    wait_for_before();
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;

    auto fetch = [&](int block) {
        unsigned char *stage = ring + block % STAGES * STAGE;
        if (block < BLOCKS) {
            for (int i = threadIdx.x; i < BN * 8; i += THREADS) {
                int m = i / 8, k = block * 128 + i % 8 * 16;
                bool there = m0 + m < tokens && k < COLS;
                copy_async(stage + m * X_PITCH + i % 8 * 16, x + (there ? (size_t)(m0 + m) * COLS + k : 0), there);
            }
            for (int i = threadIdx.x; i < BM * 2; i += THREADS) {
                int r = i / 2;
                bool there = weight_there(r);
                size_t at = there ? (size_t)weight_row(r) * ROW_BYTES + block * 32 + i % 2 * 16 : 0;
                copy_async(stage + BN * X_PITCH + r * W_PITCH + i % 2 * 16, codes + at, there);
            }
        }
        asm volatile("cp.async.commit_group;");
    };
    for (int block = 0; block < STAGES - 1; block++) fetch(block);

#if GROUP
    float total[2][NT][4] = {};
#endif
#if !GROUP || TILES > 1
    int acc[2][NT][4] = {};
#endif
    for (int block = 0; block < BLOCKS; block++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
        __syncthreads();
        fetch(block + STAGES - 1);
        const unsigned char *stage = ring + block % STAGES * STAGE;
#if GROUP
        float scale_of[SETS][2][2];
#pragma unroll
        for (int i = 0; i < SETS * 4; i++) {
            int r = row0 + i / 2 % 2 * 16 + i % 2 * 8 + group;
            size_t at = (size_t)(weight_there(r) ? weight_row(r) : 0) * COUNT + block / TILES * SETS + i / 4;
            scale_of[i / 4][i / 2 % 2][i % 2] = to_float(((const f16 *)w_scale)[at]);
        }
#endif
#if GROUP && TILES == 1
        int acc[2][NT][4];
#endif
        uint2 words[2][2];
#pragma unroll
        for (int t = 0; t < 2; t++) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                words[t][h] = *(const uint2 *)(stage + BN * X_PITCH + (row0 + t * 16 + h * 8 + group) * W_PITCH + quarter * 8);
        }
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
#if GROUP
            if (plane % (4 / SETS) == 0 && block % TILES == 0) {
#pragma unroll
                for (int i = 0; i < 2 * NT * 4; i++) acc[i / 4 / NT][i / 4 % NT][i % 4] = 0;
            }
#endif
            unsigned a[2][4];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                a[t][0] = PAIRS(words[t][0].x, plane), a[t][1] = PAIRS(words[t][1].x, plane);
                a[t][2] = PAIRS(words[t][0].y, plane), a[t][3] = PAIRS(words[t][1].y, plane);
            }
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint2 b = *(const uint2 *)(stage + (token0 + n * 8 + group) * X_PITCH + plane * 32 + quarter * 8);
                mma(acc[0][n], a[0], b.x, b.y);
                mma(acc[1][n], a[1], b.x, b.y);
            }
#if GROUP
            if ((plane + 1) % (4 / SETS) || (block + 1) % TILES) continue;
#pragma unroll
            for (int i = 0; i < 2 * NT * 4; i++) {
                int t = i / 4 / NT, n = i / 4 % NT, j = i % 4;
                total[t][n][j] = __fadd_rn(total[t][n][j], __fmul_rn((float)acc[t][n][j], scale_of[plane * SETS / 4][t][j / 2]));
            }
#endif
        }
    }

#pragma unroll
    for (int t = 0; t < 2; t++) {
        int r = row0 + t * 16 + group;
        bool low_there = weight_there(r), high_there = weight_there(r + 8);
        int n_low = weight_row(r), n_high = weight_row(r + 8);
#if !GROUP
        const unit_t *units = (const unit_t *)w_scale;
        float scale_low = low_there ? to_float(units[n_low]) : 0.0f, scale_high = high_there ? to_float(units[n_high]) : 0.0f;
#endif
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int m = m0 + token0 + n * 8 + quarter * 2 + i;
                if (m >= tokens) continue;
#if GROUP
                float factor = scale[m] * (1.0f / 64);
                float low = __fmul_rn(total[t][n][i], factor), high = __fmul_rn(total[t][n][2 + i], factor);
#else
                float low = dequantize(acc[t][n][i] - sums[m], scale[m], scale_low);
                float high = dequantize(acc[t][n][2 + i] - sums[m], scale[m], scale_high);
#endif
#if GLU
                if (low_there) out[(size_t)m * (rows / 2) + n_low] = act(low) * high;
#elif ADD  // the contract rounds this sum separately
                if (low_there) out[(size_t)m * rows + n_low] = __fadd_rn(out[(size_t)m * rows + n_low], low);
                if (high_there) out[(size_t)m * rows + n_high] = __fadd_rn(out[(size_t)m * rows + n_high], high);
#else
                if (low_there) out[(size_t)m * rows + n_low] = low;
                if (high_there) out[(size_t)m * rows + n_high] = high;
#endif
            }
        }
    }
}
