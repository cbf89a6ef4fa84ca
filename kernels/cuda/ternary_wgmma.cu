// ternary_matmul for many tokens on Hopper's asynchronous tensor cores (wgmma): BM rows of W by BN tokens a block, 64 rows a
// warpgroup, 128 of K at a time through a ring of STAGES tiles in shared memory that cp.async fills ahead.
//
// W is expanded in registers, from its codes as they lie (32 bytes a row and tile): the word at byte 4j of a row holds, at each of
// the four bit pairs, 4 neighbours of K, so that a bit pair of words q and q + 4 is thread q's part of a step of K = 32. The
// activations are read from shared memory, 128 bytes a token in the 128-byte swizzle. The codes are 0, 1, 2 for -1, 0, 1: `sums`,
// of each token's activations, is subtracted.
//
// KSPLIT > 1: the blocks of a cluster share a tile's K, and add up their integers in shared memory.
// GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
#define NT (BN / 8)
#define THREADS (2 * BM)
#define STAGES 5
#define AHEAD (STAGES - 2) /* the tile before the last may still be read when one is fetched */
#define BLOCKS (ROW_BYTES / 32)
#define STAGE (BN * 128 + BM * 32)
#if KSPLIT > 1
#define IN_CLUSTER __cluster_dims__(1, 1, KSPLIT)
#else
#define IN_CLUSTER
#endif

#define ACC(n) "+r"(acc[n][0]), "+r"(acc[n][1]), "+r"(acc[n][2]), "+r"(acc[n][3])
#define ACC8(n) ACC(n), ACC(n + 1), ACC(n + 2), ACC(n + 3), ACC(n + 4), ACC(n + 5), ACC(n + 6), ACC(n + 7)

// acc += a (64 rows of W by 32 of K, in registers) times the tokens that `x` describes.
__device__ __forceinline__ void multiply(int (&acc)[NT][4], const unsigned (&a)[4], unsigned long long x) {
#if BN == 128
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.s32.u8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, 1;"
                 : ACC8(0), ACC8(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 "
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1;"
                 : ACC8(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x));
#endif
}

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS, 512 / THREADS)
ternary_wgmma(const int *step, const signed char *x, const float *scale, const int *sums, const unsigned char *codes,
              const unit_t *w_scale, float *out, int rows) {
    extern __shared__ unsigned char unaligned[];  // the ring, and 1024 bytes to align it
    unsigned char *ring = unaligned + (1024 - (unsigned)__cvta_generic_to_shared(unaligned) % 1024) % 1024;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = blockIdx.x * BM, m0 = blockIdx.y * BN, part = blockIdx.z;
    int first = BLOCKS * part / KSPLIT, count = BLOCKS * (part + 1) / KSPLIT - first;
    auto weight_row = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 + (r % 16 < 8 ? 0 : rows / 2) : n0 + r; };
    auto weight_there = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 < rows / 2 : n0 + r < rows; };
    int tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;

    int code_row = threadIdx.x / 2, code_half = threadIdx.x % 2;
    bool code_there = weight_there(code_row);
    const unsigned char *code_from = codes + (code_there ? (size_t)weight_row(code_row) * ROW_BYTES : 0) + code_half * 16;
    int code_to = BN * 128 + code_row * 32 + (code_half ^ (code_row / 4 & 1)) * 16;  // so that a warp's words fall into all banks
    auto fetch_codes = [&](int tile) {
        if (tile < count) copy_async(ring + tile % STAGES * STAGE + code_to, code_from + (first + tile) * 32, code_there);
    };
    auto fetch_x = [&](int tile) {
        if (tile < count) {
#pragma unroll
            for (int i = threadIdx.x; i < BN * 8; i += THREADS) {
                int m = i / 8, k = (first + tile) * 128 + i % 8 * 16;
                bool there = m0 + m < tokens && k < COLS;
                const signed char *from = x + (there ? (size_t)(m0 + m) * COLS + k : 0);
                copy_async(ring + tile % STAGES * STAGE + m * 128 + (i % 8 ^ m % 8) * 16, from, there);
            }
        }
        asm volatile("cp.async.commit_group;");
    };
    for (int tile = 0; tile < AHEAD; tile++) fetch_codes(tile);
    wait_for_before();
    start_dependents();
    for (int tile = 0; tile < AHEAD; tile++) fetch_x(tile);

    int acc[NT][4] = {};
    int word = (warp * 16 + group) * 32 + quarter * 4, swap = group / 4 * 16;
    for (int tile = 0; tile < count; tile++) {
        asm volatile("cp.async.wait_group %0;\n\tfence.proxy.async.shared::cta;" ::"n"(AHEAD - 1) : "memory");
        __syncthreads();
        fetch_codes(tile + AHEAD);
        fetch_x(tile + AHEAD);
        const unsigned char *stage = ring + tile % STAGES * STAGE, *from = stage + BN * 128 + word;
        unsigned words[4] = {*(const unsigned *)(from + swap), *(const unsigned *)(from + 256 + swap),
                             *(const unsigned *)(from + (16 ^ swap)), *(const unsigned *)(from + 256 + (16 ^ swap))};
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // of the tile before
        unsigned a[4][4];
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[plane][i] = words[i] >> (6 - 2 * plane) & 0x03030303u;
        }
        // K-major, rows of 128 bytes in the 128-byte swizzle, 1024 bytes from eight rows to the next.
        unsigned long long tokens_at = (unsigned)__cvta_generic_to_shared(stage) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int plane = 0; plane < 4; plane++) multiply(acc, a[plane], tokens_at + 2 * plane);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : ACC(n));

#if KSPLIT > 1
    asm volatile("cp.async.wait_all;");
    __syncthreads();
    int4 *mine = (int4 *)ring + threadIdx.x;
#pragma unroll
    for (int n = 0; n < NT; n++) mine[n * THREADS] = make_int4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    cluster_arrive(), cluster_wait();
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (n % KSPLIT != part) continue;
#pragma unroll
        for (int s = 1; s < KSPLIT; s++) {
            int4 v;
            asm volatile("ld.shared::cluster.v4.s32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(in_block(mine + n * THREADS, (part + s) % KSPLIT)) : "memory");
            acc[n][0] += v.x, acc[n][1] += v.y, acc[n][2] += v.z, acc[n][3] += v.w;
        }
    }
    cluster_arrive(), cluster_wait();  // a block must not end while another reads its sums
#endif

    int r = warp * 16 + group;
    bool low_there = weight_there(r), high_there = weight_there(r + 8);
    int n_low = weight_row(r), n_high = weight_row(r + 8);
    float scale_low = low_there ? to_float(w_scale[n_low]) : 0.0f, scale_high = high_there ? to_float(w_scale[n_high]) : 0.0f;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        if (n % KSPLIT != part) continue;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int m = m0 + n * 8 + quarter * 2 + i;
            if (m >= tokens) continue;
            float low = dequantize(acc[n][i] - sums[m], scale[m], scale_low);
            float high = dequantize(acc[n][2 + i] - sums[m], scale[m], scale_high);
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
