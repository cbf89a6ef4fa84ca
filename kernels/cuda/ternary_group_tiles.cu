#include "tiles.cuh"
#include "group_sums.cuh"
// ternary_matmul for many tokens of weights with a scale for each group of columns (64 or 128), on Hopper's asynchronous tensor
// cores: as ternary_tiles, but each group's sums are made floats, scaled and added to the total in their order. A warpgroup
// has 64 rows of W. While a group is multiplied into one set of integers, the sums in the other are added. One more
// warpgroup has one thread that has the copy engine fill the ring, and a warp for each of the others that carries its results
// between shared and global memory while the next tile is multiplied.
//
// Codes are two's complement. A bit pair at the top of its byte is 64 times the weight, so the sums count 64-fold, which the
// tokens' factors undo exactly.
//
// A scale has 11 bits, and f32 24: the product of a scale and a sum of at most 2^13 is exact. Sums of groups of 64 are never greater,
// and those of 128 seldom. Where BOUND, `bounds` tells: the greatest sum of magnitudes in a group, for each token.
//
// A stage of the ring has two groups. Products do not hide the time of instructions, so there are few besides the sums: a warp waits for
// a stage once and releases it once, keeps its addresses in registers, and asks a stage ahead whether the next one has arrived.
// Every group is multiplied the same way, over the ends of tiles too: the last tile is followed by a stage that is read and half
// multiplied in vain. Where the groups of a row are odd in number, one of zeros follows. GLU: as in ternary_tiles.
#define COUNT (COLS / GROUP)
#define WARPGROUPS (BM / 64) /* that multiply */
#define CONSUMERS (4 * WARPGROUPS) /* their warps */
#define THREADS (BM * 2 + 128)
#define SLICES (GROUP / 64) /* of 128 columns in a stage, which has two groups */
#define STEPS ((BLOCKS + SLICES - 1) / SLICES) /* stages of a tile */
#define CODES (SLICES * BN * 128) /* bytes of a stage's activations, which its codes follow */
#define FILLED (SLICES * STAGE) /* bytes of both, which the stage's two barriers follow */
#define PLACE (FILLED + 1024) /* bytes of a stage in the ring */
#define HALF (GROUP == 64 ? 2 : 4) /* bit pairs of a slice that are of one group */
#define LANE_TOKENS ((BN + WARP - 1) / WARP)
#define PART (GLU ? 32 : 64) /* columns of out that a warpgroup makes */
#define PITCH (PART + 4) /* of their rows in shared memory: four of eight rows fall into different banks */
#define ALL_REGISTERS (65536 / RESIDENT / THREADS / 8 * 8 * THREADS) /* of a block, RESIDENT of which a multiprocessor has */
#define PRODUCER_REGISTERS 40
#define SHARED_OUT ((ALL_REGISTERS - 128 * PRODUCER_REGISTERS) / (2 * BM) / 8 * 8)
#define CONSUMER_REGISTERS (SHARED_OUT < 232 ? SHARED_OUT : 232)

#define PRODUCT(shape, names, given, ...)                                                  \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".s32.s8.s8 {" names "}, " given ";" \
                 : __VA_ARGS__                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "n"(ADDED))

// acc = a (64 rows of W by 32 of K, in registers) times the tokens that `x` describes; plus acc, where there are any yet.
template <int ADDED>
__device__ __forceinline__ void multiply(int (&acc)[NT][4], const unsigned *a, unsigned long long x) {
#if BN == 128
    PRODUCT("m64n128k32", NAMES64, "{%64,%65,%66,%67}, %68, %69", ACC4(0), ACC4(4), ACC4(8), ACC4(12));
#elif BN == 64
    PRODUCT("m64n64k32", NAMES32, "{%32,%33,%34,%35}, %36, %37", ACC4(0), ACC4(4));
#elif BN == 32
    PRODUCT("m64n32k32", NAMES16, "{%16,%17,%18,%19}, %20, %21", ACC4(0));
#elif BN == 16
    PRODUCT("m64n16k32", NAMES8, "{%8,%9,%10,%11}, %12, %13", ACC(0), ACC(1));
#elif BN == 8
    PRODUCT("m64n8k32", "%0,%1,%2,%3", "{%4,%5,%6,%7}, %8, %9", ACC(0));
#endif
}

// Waits for them. Only here may ptxas see that the sums are there: with other products under way it would serialise all.
__device__ __forceinline__ void finish(int (&acc)[NT][4]) {
    products_wait<0>();
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : ACC(n));
}

// Products of the bit pairs FROM to TO - 1 of a slice begin.
template <int FROM, int TO>
__device__ __forceinline__ void begin(int (&acc)[NT][4], const unsigned (&words)[4], unsigned long long x) {
    unsigned a[TO - FROM][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int plane = FROM; plane < TO; plane++) a[plane - FROM][i] = words[i] << 2 * plane & 0xC0C0C0C0u;
    }
    products_begin();
    multiply<0>(acc, a[0], x + 2 * FROM);
#pragma unroll
    for (int plane = FROM + 1; plane < TO; plane++) multiply<1>(acc, a[plane - FROM], x + 2 * plane);
    products_commit();
}

// Carries `rows` rows of `width` floats at most to shared memory, without waiting, or from there.
template <bool IN>
__device__ __forceinline__ void carry(float *shared, float *global, int rows, int width, int stride, int lane) {
    if (stride % 4 == 0) {
#pragma unroll 4
        for (int i = lane; i < BN * (PART / 4); i += WARP) {
            int m = i / (PART / 4), n = i % (PART / 4) * 4;
            if (m >= rows || n >= width) continue;
            if (IN) copy_async(shared + m * PITCH + n, global + (size_t)m * stride + n, true);
            else *(float4 *)(global + (size_t)m * stride + n) = *(const float4 *)(shared + m * PITCH + n);
        }
    } else {
        for (int i = lane; i < BN * PART; i += WARP) {
            int m = i / PART, n = i % PART;
            if (m >= rows || n >= width) continue;
            if (IN) shared[m * PITCH + n] = global[(size_t)m * stride + n];
            else global[(size_t)m * stride + n] = shared[m * PITCH + n];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
ternary_group_tiles(const int *step, const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes, const float *scale,
                    const int *bounds, const void *w_scale, float *out, int rows) {
    extern __shared__ unsigned char unaligned[];  // the ring, 1024 bytes to align it, and results [WARPGROUPS][BN][PITCH]
    __shared__ Barrier ready[WARPGROUPS], made[WARPGROUPS];
    __shared__ float scales[WARPGROUPS][BN];
    unsigned char *ring = unaligned + (1024 - shared_at(unaligned) % 1024) % 1024;
    auto full = [&](int stage) { return (Barrier *)(ring + stage * PLACE + FILLED); };
    auto empty = [&](int stage) { return full(stage) + 1; };
    int warp = __shfl_sync(FULL, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int tokens = STEP_TOKENS(step), row_tiles = (rows + BM - 1) / BM, tiles = row_tiles * ((tokens + BN - 1) / BN);
    if (blockIdx.x >= tiles) return;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full(s), 1), barrier_init(empty(s), ARRIVALS(CONSUMERS));
        for (int i = 0; i < WARPGROUPS; i++) barrier_init(ready + i, ARRIVALS(1)), barrier_init(made + i, ARRIVALS(4));
        barriers_ready();
    }
    __syncthreads();
    start_dependents();

    if (warp >= CONSUMERS) {
        registers_less<PRODUCER_REGISTERS>();
        if (threadIdx.x == CONSUMERS * WARP) {
            auto fetch_codes = [&](int stage, int tile, int k) {
                int n0 = tile % row_tiles * BM;
                barrier_expect(full(stage), FILLED);
#pragma unroll
                for (int i = 0; i < SLICES; i++) {
                    unsigned char *to = ring + stage * PLACE + CODES + i * BM * 32;
                    int at = (k * SLICES + i) * 32;
#if GLU
                    copy_tile(to, &codes, at, n0 / 2, full(stage));
                    copy_tile(to + BM * 16, &codes, at, (rows + n0) / 2, full(stage));
#else
                    copy_tile(to, &codes, at, n0, full(stage));
#endif
                }
            };
            auto fetch_x = [&](int stage, int tile, int k) {
#pragma unroll
                for (int i = 0; i < SLICES; i++) {
                    copy_tile(ring + stage * PLACE + i * BN * 128, &x, (k * SLICES + i) * 128, tile / row_tiles * BN, full(stage));
                }
            };
            const int ahead = STAGES < STEPS ? STAGES : STEPS;
#pragma unroll 1
            for (int k = 0; k < ahead; k++) fetch_codes(k, blockIdx.x, k);
            wait_for_before();
#pragma unroll 1
            for (int k = 0; k < ahead; k++) fetch_x(k, blockIdx.x, k);
            int stage = ahead % STAGES, parity = ahead / STAGES ^ 1, k = ahead;
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
                int end = STEPS + (tile + (int)gridDim.x >= tiles);
#pragma unroll 1
                for (; k < end; k++) {
                    barrier_wait(empty(stage), parity);
                    fetch_codes(stage, tile, k), fetch_x(stage, tile, k);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                k = 0;
            }
        } else if (warp > CONSUMERS && warp <= CONSUMERS + WARPGROUPS) {
            int which = warp - CONSUMERS - 1, width = GLU ? rows / 2 : rows, parity = 0;
            float *results = (float *)(ring + STAGES * PLACE) + which * BN * PITCH;
            wait_for_before();
            for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, parity ^= 1) {
                int n0 = tile % row_tiles * (WARPGROUPS * PART) + which * PART, m0 = tile / row_tiles * BN, there = min(tokens - m0, BN);
                float *to = out + (size_t)m0 * width + n0;
                for (int i = lane; i < BN; i += WARP) scales[which][i] = scale[m0 + min(i, there - 1)];
#if ADD
                carry<true>(results, to, there, width - n0, width, lane);
                asm volatile("cp.async.wait_all;" ::: "memory");
#endif
                warp_arrive(ready + which, lane);
                barrier_wait(made + which, parity);
                carry<false>(results, to, there, width - n0, width, lane);
                __syncwarp();
            }
        }
        return;
    }
    registers_more<CONSUMER_REGISTERS>();

    int parity = 0, which = warp / 4, row = warp * 16 + group;
    // Addresses in shared memory: of the stage that is read next, its codes, the oldest stage in use, and the ring's last. The
    // compiler would find them anew each time.
    unsigned next = shared_at(ring), oldest = next, last = next + (STAGES - 1) * PLACE, never = rows < 0;
    unsigned code = next + CODES + (GLU ? warp * 8 + group : row) * 32 + quarter * 4 + group / 4 * 16;  // rows of 32 bytes are swizzled
    asm volatile("" : "+r"(next), "+r"(oldest), "+r"(last), "+r"(code), "+r"(never));
    bool there = false;  // whether the next stage is known to have arrived
    unsigned words[4], halves_low, halves_high;
    unsigned long long x_at;
    auto load_words = [&](int slice) {
        unsigned at = code + slice * (BM * 32), far = GLU ? BM * 16 : 256;
        words[0] = load_shared(at), words[1] = load_shared(at + far);
        words[2] = load_shared(at ^ 16), words[3] = load_shared((at ^ 16) + far);
    };
    auto read = [&] {  // the first group of the next stage: a thread's codes, and where the activations are
        x_at = operand(next);
        if (!there) barrier_wait(next + FILLED, parity);
        load_words(0);
        bool wraps = next == last;
        there = barrier_ended((wraps ? next - (STAGES - 1) * PLACE : next + PLACE) + FILLED, parity ^ wraps);
    };
    auto read_on = [&] {  // its second group
        if (never) barrier_wait(next + FILLED, parity);
        if (GROUP != 64) load_words(1), x_at += BN * 128 / 16;
        bool wraps = next == last;
        int step = wraps ? -(STAGES - 1) * PLACE : PLACE;
        next += step, code += step, parity ^= wraps;
    };
    auto release = [&] {  // the oldest, once all lanes have read it
        warp_arrive(oldest + FILLED + 8, lane);
        oldest = oldest == last ? oldest - (STAGES - 1) * PLACE : oldest + PLACE;
    };
    unsigned scales_low, scales_high;  // index of the next scales of a thread's rows: in words of two scales, unless COUNT is odd
    auto find_scales = [&](int tile) {
        int n0 = tile % row_tiles * BM, n_low = GLU ? n0 / 2 + warp * 8 + group : n0 + row, n_high = n_low + (GLU ? rows / 2 : 8);
        const unsigned pitch = COUNT % 2 ? COUNT : COUNT / 2;
        scales_low = min(n_low, rows - 1) * pitch, scales_high = min(n_high, rows - 1) * pitch;
    };
    auto load_scales = [&](int g) {  // of two groups
#if COUNT % 2
        const unsigned short *at = (const unsigned short *)w_scale + g;
        halves_low = at[scales_low], halves_high = at[scales_high];
        if (g + 1 < COUNT) halves_low |= at[scales_low + 1] << 16, halves_high |= at[scales_high + 1] << 16;
#else
        halves_low = ((const unsigned *)w_scale)[scales_low++], halves_high = ((const unsigned *)w_scale)[scales_high++];
#endif
    };
    int sums[LANE_TOKENS];  // the bounds of a lane's tokens
    auto load_bounds = [&](int tile) {
#pragma unroll
        for (int i = 0; i < LANE_TOKENS; i++) {
            int here = i * WARP + lane, m = tile / row_tiles * BN + here;
            sums[i] = here < BN && m < tokens ? bounds[m] : 0;
        }
    };
    if (BOUND) wait_for_before(), load_bounds(blockIdx.x);
    int acc[2][NT][4];
    find_scales(blockIdx.x);
    load_scales(0);
    read();
    begin<0, HALF>(acc[0], words, x_at);
    read_on();
    for (int tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, turn ^= 1) {
        float total[NT][4] = {};
        bool exact = BOUND;
        for (int i = 0; BOUND && i < LANE_TOKENS; i++) exact &= sums[i] <= 8192;
        exact = __all_sync(FULL, exact);
#pragma unroll 1
        for (int g = 0; g < 2 * STEPS; g += 2) {
            // read and read_on have a branch, though read_on's is never taken: ptxas moves no sums past it to where they would delay products.
            finish(acc[0]);
            begin<4 - HALF, 4>(acc[1], words, x_at);
            read();
            add_group(total, acc[0], factor<0>(halves_low), factor<0>(halves_high), GROUP == 64 || exact);
            finish(acc[1]);
            begin<0, HALF>(acc[0], words, x_at);
            release();
            read_on();
            add_group(total, acc[1], factor<1>(halves_low), factor<1>(halves_high), GROUP == 64 || exact);
            if (g + 2 < COUNT) load_scales(g + 2);
        }
        if (tile + gridDim.x < tiles) find_scales(tile + gridDim.x), load_scales(0);
        if (BOUND && tile + gridDim.x < tiles) load_bounds(tile + gridDim.x);
        const float *scales_here = scales[which] + quarter * 2;
        float *to = (float *)(ring + STAGES * PLACE) + (which * BN + quarter * 2) * PITCH + warp % 4 * (PART / 4) + group;
        barrier_wait(ready + which, turn);
        constexpr int LONGEST = GLU ? 8 : 4, BATCH = NT < LONGEST ? NT : LONGEST;  // whose loads come first, as the compiler moves none over stores
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += BATCH) {
            float factors[BATCH][2], old[BATCH][4];
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                float2 s = *(const float2 *)(scales_here + (n0 + n) * 8);
                factors[n][0] = s.x * (1.0f / 64), factors[n][1] = s.y * (1.0f / 64);  // as sums count 64-fold
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float *at = to + ((n0 + n) * 8 + i) * PITCH;
                    if (ADD) old[n][i] = at[0], old[n][2 + i] = at[8];
                }
            }
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float *at = to + ((n0 + n) * 8 + i) * PITCH;
                    float v_low = __fmul_rn(total[n0 + n][i], factors[n][i]), v_high = __fmul_rn(total[n0 + n][2 + i], factors[n][i]);
#if GLU
                    *at = act(v_low) * v_high;
#elif ADD  // the contract rounds this sum separately
                    at[0] = __fadd_rn(old[n][i], v_low), at[8] = __fadd_rn(old[n][2 + i], v_high);
#else
                    at[0] = v_low, at[8] = v_high;
#endif
                }
            }
        }
        warp_arrive(made + which, lane);
    }
    finish(acc[0]);  // before the block ends
}
