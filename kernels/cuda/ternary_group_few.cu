// ternary_matmul for some 17 to 64 tokens of weights with a scale for each group of 128 columns, on Hopper's asynchronous tensor cores:
// BM rows of W by BN tokens a block, over all of K in its order. As in ternary_group_tiles, a warpgroup has 64 rows, and while a group is
// multiplied into one set of integers, the sums in the other are made floats, scaled and added to the total; codes and bounds are as there.
//
// A block has one tile, so its results go from registers to memory, and its scales are in shared memory as a whole. One more warp has the copy
// engine fill the ring, a group a stage: codes before the kernel waits for its predecessor, then activations. GLU: as in ternary_decode,
// every 16 rows are 8 gates and their 8 ups.
#define NT (BN / 8)
#define A_TYPE "s8"
#include "columns.cuh"
#include "group_sums.cuh"
#define COUNT (COLS / 128)
#define CONSUMERS (BM / 16) /* warps that multiply */
#define THREADS (BM * 2 + WARP)
#define X_BYTES (BN * 128)
#define STAGE (X_BYTES + BM * 32)
#define PITCH (COUNT * 2) /* bytes of a row's scales */

extern "C" __global__ void __launch_bounds__(THREADS, 1)
ternary_group_few(const int *step, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes, const float *scale,
                  const int *bounds, const unsigned char *w_scale, float *out, int rows) {
    extern __shared__ unsigned char unaligned[];  // [SLOTS][STAGE], 1024 bytes to align it, [BM][PITCH]
    __shared__ Barrier full[SLOTS], empty[SLOTS], scaled;
    __shared__ float x_scale[BN];
    unsigned char *ring = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024, *scales = ring + SLOTS * STAGE;
    int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int n0 = blockIdx.x * BM, m0 = blockIdx.y * BN, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;

    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; s++) barrier_init(full + s, 1), barrier_init(empty + s, ARRIVALS(CONSUMERS));
        barrier_init(&scaled, 1);
        barriers_ready();
    }
    __syncthreads();
    start_dependents();

    if (warp == CONSUMERS) {
        if (lane > 0) return;
        auto fetch_codes = [&](int slot, int u) {
            unsigned char *to = ring + slot * STAGE + X_BYTES;
            barrier_expect(full + slot, STAGE);
            copy_tile(to, &codes, u * 32, GLU ? n0 / 2 : n0, full + slot);
            copy_tile(to + BM * 16, &codes, u * 32, GLU ? (rows + n0) / 2 : n0 + BM / 2, full + slot);
        };
        auto fetch_x = [&](int slot, int u) { copy_tile(ring + slot * STAGE, &x, u * 128, m0, full + slot); };
#pragma unroll 1
        for (int u = 0; u < SLOTS; u++) fetch_codes(u, u);
        unsigned bytes = (GLU ? min(BM, rows - n0) / 2 : min(BM, rows - n0)) * PITCH;
        barrier_expect(&scaled, (1 + GLU) * bytes);
        copy_bytes(scales, w_scale + (size_t)(GLU ? n0 / 2 : n0) * PITCH, bytes, &scaled);
        if (GLU) copy_bytes(scales + BM / 2 * PITCH, w_scale + (size_t)((rows + n0) / 2) * PITCH, bytes, &scaled);
        wait_for_before();
#pragma unroll 1
        for (int u = 0; u < SLOTS; u++) fetch_x(u, u);
        int slot = 0, parity = 0;
#pragma unroll 1
        for (int u = SLOTS; u < COUNT; u++) {
            barrier_wait(empty + slot, parity);
            fetch_codes(slot, u), fetch_x(slot, u);
            if (++slot == SLOTS) slot = 0, parity ^= 1;
        }
        return;
    }

    int in_tile = GLU ? warp * 8 + group : warp * 16 + group, n_low = (GLU ? n0 / 2 : n0) + in_tile, n_high = n_low + (GLU ? rows / 2 : 8);
    bool low_there = n_low < (GLU ? rows / 2 : rows), high_there = n_high < rows;
    constexpr unsigned FAR = GLU ? BM * 16 : 256;  // between codes of rows low and high
    // Addresses in shared memory: of the stage that is read next, its barrier, and the barrier of the oldest stage in use.
    unsigned next = shared_at(ring), next_full = shared_at(full), oldest = shared_at(empty), parity = 0;
    unsigned code = X_BYTES + in_tile * 32 + quarter * 4 + group / 4 * 16;  // rows of 32 bytes are swizzled
    unsigned low_scale = shared_at(scales) + in_tile * PITCH, high_scale = low_scale + (GLU ? BM / 2 : 8) * PITCH;
    wait_for_before();
    for (int i = threadIdx.x; i < BN; i += BM * 2) x_scale[i] = scale[min(m0 + i, tokens - 1)] * (1.0f / 64);  // as sums count 64-fold
    bool exact = BOUND;
    for (int i = lane; BOUND && i < BN; i += WARP) exact &= bounds[min(m0 + i, tokens - 1)] <= 8192;
    exact = __all_sync(FULL, exact);
    barrier_wait(&scaled, 0);

    float total[NT][4] = {};
    int acc[2][NT][4] = {};
    unsigned words[4], low_units, high_units;
    unsigned long long x_at;
    auto read = [&] {  // the next group: a thread's codes, and where the activations are
        barrier_wait(next_full, parity);
        unsigned at = next + code;
        words[0] = load_shared(at), words[1] = load_shared(at + FAR), words[2] = load_shared(at ^ 16), words[3] = load_shared((at ^ 16) + FAR);
        x_at = operand(next);
        bool wraps = next_full == shared_at(full + SLOTS - 1);
        next = wraps ? next - (SLOTS - 1) * STAGE : next + STAGE, next_full = wraps ? shared_at(full) : next_full + 8, parity ^= wraps;
        asm volatile("" : "+r"(next), "+r"(next_full), "+r"(parity));  // without it, the compiler unfolds all of them for minutes
    };
    auto begin = [&](int (&sums)[NT][4]) {
        unsigned a[4][4];
#pragma unroll
        for (int i = 0; i < 16; i++) a[i / 4][i % 4] = words[i % 4] << i / 4 * 2 & 0xC0C0C0C0u;
        expanded(a);
        products_begin();
        multiply<0>(sums, a[0], x_at);
#pragma unroll
        for (int plane = 1; plane < 4; plane++) multiply(sums, a[plane], x_at + 2 * plane);
        products_commit();
    };
    auto release = [&] {  // the oldest, which all lanes have read and the tensor cores, too
        warp_arrive(oldest, lane);
        oldest = oldest == shared_at(empty + SLOTS - 1) ? shared_at(empty) : oldest + 8;
    };
    auto load_scales = [&] {  // of two groups
        low_units = load_shared(low_scale), high_units = load_shared(high_scale);
        low_scale += 4, high_scale += 4;
    };
    // `exact` is tested in add_group though it may be known: ptxas moves no sums past a branch to where they would delay products.
    read();
    begin(acc[0]);
    read();
#pragma unroll 1
    for (int u = 0; u < COUNT - 2; u += 2) {
        load_scales();
        products_end(acc[0]);
        begin(acc[1]), release(), read();
        add_group(total, acc[0], factor<0>(low_units), factor<0>(high_units), exact);
        products_end(acc[1]);
        begin(acc[0]), release(), read();
        add_group(total, acc[1], factor<1>(low_units), factor<1>(high_units), exact);
    }
    load_scales();
    products_end(acc[0]);
    begin(acc[1]);
    add_group(total, acc[0], factor<0>(low_units), factor<0>(high_units), exact);
    auto token_of = [&](int i) { return m0 + i / 4 * 8 + quarter * 2 + i % 2; };
#if ADD
    float old[NT * 4];
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        bool there = token_of(i) < tokens && (i % 4 < 2 ? low_there : high_there);
        old[i] = there ? out[(size_t)token_of(i) * rows + (i % 4 < 2 ? n_low : n_high)] : 0.0f;
    }
#endif
    products_end(acc[1]);
    add_group(total, acc[1], factor<1>(low_units), factor<1>(high_units), exact);
    asm volatile("bar.sync 1, %0;" ::"n"(BM * 2) : "memory");  // x_scale is there
#pragma unroll
    for (int i = 0; i < NT * 4; i++) {
        int m = token_of(i);
        if (m >= tokens || (GLU && i % 4 >= 2)) continue;
        float s = x_scale[m - m0], value = __fmul_rn(total[i / 4][i % 4], s);
#if GLU
        if (low_there) out[(size_t)m * (rows / 2) + n_low] = act(value) * __fmul_rn(total[i / 4][i % 4 + 2], s);
#else
#if ADD  // the contract rounds this sum separately
        value = __fadd_rn(old[i], value);
#endif
        if (i % 4 < 2 ? low_there : high_there) out[(size_t)m * rows + (i % 4 < 2 ? n_low : n_high)] = value;
#endif
    }
}
