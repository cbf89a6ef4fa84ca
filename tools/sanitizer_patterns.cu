// What kernels do with barriers and the copy engine, in the smallest form. Each is run under compute-sanitizer by sanitizer_patterns.py.
//
// EVERY_LANE_ARRIVES: see hopper.cuh. RACES: accesses come before the wait that they need, which the tool has to find.
#define ROUNDS 8

// As results pass from warp to warp in ternary_group_tiles: warp 0 writes a row, warp 1 reads it, and so in turn.
extern "C" __global__ void __launch_bounds__(2 * WARP) handed_over(const int *in, int *out) {
    __shared__ int row[WARP];
    __shared__ Barrier full, empty;
    int lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) barrier_init(&full, ARRIVALS(1)), barrier_init(&empty, ARRIVALS(1)), barriers_ready();
    __syncthreads();
    for (int i = 0; i < ROUNDS; i++) {
        if (threadIdx.x < WARP) {
            if (i > 0) barrier_wait(&empty, i - 1 & 1);
            row[lane] = in[i * WARP + lane];
            warp_arrive(&full, lane);
        } else {
            if (!RACES) barrier_wait(&full, i & 1);
            out[i * WARP + lane] = row[WARP - 1 - lane];
            if (RACES) barrier_wait(&full, i & 1);
            warp_arrive(&empty, lane);
        }
    }
}

// As codes of the int8 cache in attention_wgmma: COPIERS lanes of warp 0 have the copy engine fill a row, each its part; warp 1 reads it.
extern "C" __global__ void __launch_bounds__(2 * WARP) refilled(const int *in, int *out) {
    __shared__ __align__(128) int row[WARP];
    __shared__ Barrier full, empty;
    int lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) barrier_init(&full, 1), barrier_init(&empty, ARRIVALS(1)), barriers_ready();
    __syncthreads();
    for (int i = 0; i < ROUNDS; i++) {
        if (threadIdx.x < WARP) {
            if (!RACES && i > 0) barrier_wait(&empty, i - 1 & 1);
            if (lane == 0) barrier_expect(&full, sizeof row);
            __syncwarp();
            const int part = WARP / COPIERS;
            if (lane < COPIERS) copy_bytes(row + lane * part, in + i * WARP + lane * part, part * 4, &full);
            if (RACES && i > 0) barrier_wait(&empty, i - 1 & 1);
        } else {
            barrier_wait(&full, i & 1);
            out[i * WARP + lane] = row[WARP - 1 - lane];
            warp_arrive(&empty, lane);
        }
    }
}

// As in ternary_bits: one lane makes its warp's barrier, expects bytes there and starts their copy. The other lanes wait for the barrier
// after __syncthreads().
extern "C" __global__ void __launch_bounds__(2 * WARP) own_barriers(const int *in, int *out) {
    __shared__ __align__(128) int rows[2][WARP];
    __shared__ Barrier full[2];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) {
        barrier_init(full + warp, 1);
        barriers_ready();
    }
    if (SYNCED) __syncwarp();
    if (lane == 0) {
        barrier_expect(full + warp, sizeof rows[0]);
        copy_bytes(rows[warp], in + warp * WARP, sizeof rows[0], full + warp);
    }
    __syncthreads();
    if (!RACES) barrier_wait(full + warp, 0);
    out[threadIdx.x] = rows[warp][WARP - 1 - lane];
    if (RACES) barrier_wait(full + warp, 0);
}

// The last two bytes of an allocation, as the first half of a word: cp.async reads as many bytes as its last operand says.
extern "C" __global__ void __launch_bounds__(WARP) half_a_word(const unsigned short *in, unsigned *out, int count) {
    __shared__ unsigned word;
    if (threadIdx.x == 0) {
        int bytes = RACES ? 4 : 2;  // 4 are two beyond the end
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_at(&word)), "l"(in + count - 1), "r"(bytes));
        copies_commit(), copies_wait<0>();
        out[0] = word;
    }
}
