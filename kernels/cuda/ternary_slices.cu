// ternary_matmul for some 9 to 64 tokens on Hopper's asynchronous tensor cores (wgmma): BM rows of W by BN tokens a block, over a slice of
// K, in units of 128 columns. With so few tokens, fetching takes longer than multiplying. So a block fetches its slice of the codes as a
// whole, before the kernel waits for its predecessor; then the copy engine brings activations, SLOTS units ahead.
//
// KSPLIT blocks of a cluster share K, one slice after the other, and KPARTS warpgroups of a block share its units, in turn. Each of these
// PARTS hands its sums to the part that finishes them: integers, so their order does not matter. In a cluster they are sent, and a
// barrier counts their bytes. Where KPARTS > 1, all units have a place of their own.
//
// W is expanded as in ternary_tiles. GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
#define NT (BN / 8)
#define A_TYPE "u8"
#include "columns.cuh"
#define BLOCKS (ROW_BYTES / 32)
#define ROW_GROUPS (BM / 64)
#define THREADS (128 * ROW_GROUPS * KPARTS)
#define UNITS ((BLOCKS + KSPLIT - 1) / KSPLIT) /* of the longest slice */
#define PITCH (UNITS * 32 + 16) /* bytes of a row's codes; eight rows fall into different banks */
#define PARTS (KSPLIT * KPARTS)
#define SHARE ((NT + PARTS - 1) / PARTS) /* of 8 tokens, that a part finishes at most */
#define LAG 2 /* units between the fastest warps and the slowest where a unit's place is filled again */
#define X_BYTES (SLOTS * BN * 128)
#define CODES (BM * PITCH)
#if KSPLIT > 1
#define IN_CLUSTER __cluster_dims__(1, 1, KSPLIT)
#else
#define IN_CLUSTER
#endif

// Sends a thread's sums to block `rank` of the cluster, where `barrier` counts the bytes.
__device__ __forceinline__ void send_sums(const void *to, const int (&v)[4], int rank, Barrier *barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(in_block(to, rank)), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(in_block(barrier, rank)) : "memory");
}

extern "C" __global__ void IN_CLUSTER __launch_bounds__(THREADS, 1)
ternary_slices(const int *step, const __grid_constant__ TensorMap x, const float *scale, const int *sums, const unsigned char *codes,
               const unit_t *w_scale, float *out, int rows) {
    extern __shared__ unsigned char unaligned[];  // [SLOTS][BN][128], 1024 bytes to align it, [BM][PITCH], sums of other parts
    __shared__ Barrier full[UNITS], sent;
#if SLOTS < UNITS
    __shared__ Barrier empty[UNITS - SLOTS];
#endif
    __shared__ float x_scale[BN];
    __shared__ int x_sum[BN];
    unsigned char *x_shared = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024, *codes_shared = x_shared + X_BYTES;
    [[maybe_unused]] auto passed = (int4(*)[PARTS - (PARTS > 1)][SHARE][ROW_GROUPS * 128])(codes_shared + CODES);  // [KPARTS]
    int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = blockIdx.x * BM, m0 = blockIdx.y * BN, slice = blockIdx.z;
    int first = BLOCKS * slice / KSPLIT, count = BLOCKS * (slice + 1) / KSPLIT - first;
    int row_group = warp / 4 % ROW_GROUPS, kpart = warp / 4 / ROW_GROUPS, part = slice * KPARTS + kpart;
    auto weight_row = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 + (r % 16 < 8 ? 0 : rows / 2) : n0 + r; };
    auto weight_there = [&](int r) { return GLU ? n0 / 2 + r / 16 * 8 + r % 8 < rows / 2 : n0 + r < rows; };

    if (threadIdx.x == 0) {
        for (int u = 0; u < UNITS; u++) barrier_init(full + u, 1);
        barrier_init(&sent, 1);
#if SLOTS < UNITS
        for (int u = 0; u < UNITS - SLOTS; u++) barrier_init(empty + u, ARRIVALS(ROW_GROUPS * 4));
#endif
        barriers_ready();
    }
    for (int i = threadIdx.x; i < BM * UNITS * 2; i += THREADS) {
        int r = i / (UNITS * 2), c = i % (UNITS * 2);
        bool there = weight_there(r) && c < count * 2;
        copy_async(codes_shared + r * PITCH + c * 16, codes + (there ? (size_t)weight_row(r) * ROW_BYTES + first * 32 + c * 16 : 0), there);
    }
    start_dependents();
    int r = row_group * 64 + warp % 4 * 16 + group;
    bool low_there = weight_there(r), high_there = weight_there(r + 8);
    int n_low = weight_row(r), n_high = weight_row(r + 8), tokens = STEP_TOKENS(step);
    float scale_low = low_there ? to_float(w_scale[n_low]) : 0.0f, scale_high = high_there ? to_float(w_scale[n_high]) : 0.0f;
    if (m0 >= tokens) return;
    __syncthreads();
#if KSPLIT > 1
    cluster_arrive();
#endif
    wait_for_before();
    auto fetch_x = [&](int u) {
        barrier_expect(full + u, BN * 128);
        copy_tile(x_shared + u % SLOTS * BN * 128, &x, (first + u) * 128, m0, full + u);
    };
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int u = 0; u < min(count, SLOTS); u++) fetch_x(u);
#if KSPLIT > 1
        int finished = 0;  // of 8 tokens, by this block's parts
        for (int p = 0; p < KPARTS; p++) finished += (NT - 1 - (slice * KPARTS + p) + PARTS) / PARTS;
        barrier_expect(&sent, finished * (PARTS - 1) * ROW_GROUPS * 128 * 16);
#endif
    }
    for (int i = threadIdx.x; i < BN; i += THREADS) {
        int m = min(m0 + i, tokens - 1);
        x_scale[i] = scale[m], x_sum[i] = sums[m];
    }
    auto token_of = [&](int j, int i) { return m0 + (j * PARTS + part) * 8 + quarter * 2 + i; };
#if ADD
    float old[SHARE][4];
#pragma unroll
    for (int i = 0; i < SHARE * 4; i++) {
        int m = token_of(i / 4, i % 2);
        bool there = m < min(tokens, m0 + BN) && (i % 4 < 2 ? low_there : high_there);
        old[i / 4][i % 4] = there ? out[(size_t)m * rows + (i % 4 < 2 ? n_low : n_high)] : 0.0f;
    }
#endif
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    int acc[NT][4] = {};
    const unsigned char *code = codes_shared + r * PITCH + quarter * 4;
    for (int u = kpart; u < count; u += KPARTS) {
        const unsigned *low = (const unsigned *)(code + u * 32), *high = low + 8 * PITCH / 4;
        unsigned words[4] = {low[0], high[0], low[4], high[4]};
        barrier_wait(full + u, 0);
        products_wait<0>();  // of the unit before
#if SLOTS < UNITS
        if (u > 0 && u <= UNITS - SLOTS) warp_arrive(empty + u - 1, lane);
#endif
        unsigned a[4][4];
#pragma unroll
        for (int plane = 0; plane < 4; plane++) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[plane][i] = words[i] >> (6 - 2 * plane) & 0x03030303u;
        }
        expanded(a);
        unsigned long long x_at = operand(x_shared + u % SLOTS * BN * 128);
        products_begin();
#pragma unroll
        for (int plane = 0; plane < 4; plane++) multiply(acc, a[plane], x_at + 2 * plane);
        products_commit();
#if SLOTS < UNITS
        if (threadIdx.x == 0 && u >= LAG && u - LAG + SLOTS < count) {
            barrier_wait(empty + u - LAG, 0);
            fetch_x(u - LAG + SLOTS);
        }
        __syncwarp();
#endif
    }
    products_end(acc);

    int mine[SHARE][4] = {};
#if KSPLIT > 1
    cluster_wait();  // all blocks have begun
#endif
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int owner = n % PARTS;
        if (owner == part) {
#pragma unroll
            for (int i = 0; i < 4; i++) mine[n / PARTS][i] = acc[n][i];
        }
#if PARTS > 1
        else {
            int4 *to = &passed[owner % KPARTS][part - (part > owner)][n / PARTS][row_group * 128 + threadIdx.x % 128];
#if KSPLIT > 1
            send_sums(to, acc[n], owner / KPARTS, &sent);
#else
            *to = make_int4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
#endif
        }
#endif
    }
#if PARTS > 1
#if KSPLIT > 1
    barrier_wait(&sent, 0);
#else
    __syncthreads();
#endif
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        if (j * PARTS + part >= NT) break;
#pragma unroll
        for (int s = 0; s < PARTS - 1; s++) {
            int4 v = passed[kpart][s][j][row_group * 128 + threadIdx.x % 128];
            mine[j][0] += v.x, mine[j][1] += v.y, mine[j][2] += v.z, mine[j][3] += v.w;
        }
    }
#endif
#pragma unroll
    for (int j = 0; j < SHARE; j++) {
        if (j * PARTS + part >= NT) break;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int m = token_of(j, i);
            if (m >= tokens) continue;
            float s = x_scale[m - m0];
            float v_low = dequantize(mine[j][i] - x_sum[m - m0], s, scale_low);
            float v_high = dequantize(mine[j][2 + i] - x_sum[m - m0], s, scale_high);
#if GLU
            if (low_there) out[(size_t)m * (rows / 2) + n_low] = act(v_low) * v_high;
#elif ADD  // the contract rounds this sum separately
            if (low_there) out[(size_t)m * rows + n_low] = __fadd_rn(old[j][i], v_low);
            if (high_there) out[(size_t)m * rows + n_high] = __fadd_rn(old[j][2 + i], v_high);
#else
            if (low_there) out[(size_t)m * rows + n_low] = v_low;
            if (high_there) out[(size_t)m * rows + n_high] = v_high;
#endif
        }
    }
}
