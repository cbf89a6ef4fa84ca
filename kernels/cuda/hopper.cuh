// Hopper's asynchronous units: barriers in shared memory, bulk copies of tiles, products of a warpgroup.
typedef unsigned long long Barrier;

// The driver's descriptor of a matrix in memory and of the tile that is copied at a time.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// An address in shared memory as a number stays what it is. Kernels that must save instructions keep numbers, so that the compiler
// does not convert pointers again and again.
__device__ __forceinline__ unsigned shared_at(unsigned at) { return at; }

__device__ __forceinline__ void barrier_init(Barrier *b, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_at(b)), "r"(count) : "memory");
}

// After the first inits, before a __syncthreads().
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

template <class At>
__device__ __forceinline__ void barrier_arrive(At b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_at(b)) : "memory");
}

// A warp arrives: one lane for all. bar.warp.sync (__syncwarp) orders what the other lanes have read and written before the arrival,
// which releases it to whoever waits. compute-sanitizer's racecheck takes an arrival for the arriving lane's own accesses only, and
// reports those of the others (tools/sanitizer_patterns.cu shows it). For it, EVERY_LANE_ARRIVES has each lane arrive.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
#define ARRIVALS(warps) (EVERY_LANE_ARRIVES ? (warps) * WARP : (warps)) /* at a barrier that so many warps arrive at */
template <class At>
__device__ __forceinline__ void warp_arrive(At b, int lane) {
    __syncwarp();
    if (EVERY_LANE_ARRIVES || lane == 0) barrier_arrive(b);
}

// Arrives, and has the barrier's phase wait for `bytes` bytes of copies, too.
__device__ __forceinline__ void barrier_expect(Barrier *b, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(b)), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended.
template <class At>
__device__ __forceinline__ void barrier_wait(At b, int parity) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}"
                 ::"r"(shared_at(b)), "r"(parity) : "memory");
}

// Whether that phase has ended.
__device__ __forceinline__ bool barrier_ended(unsigned b, int parity) {
    unsigned ended;
    asm volatile("{\n\t.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\tselp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(ended) : "r"(b), "r"(parity) : "memory");
    return ended;
}

// Copies the tile at column x and row y; zeros past the matrix.
__device__ __forceinline__ void copy_tile(void *to, const TensorMap *map, int x, int y, Barrier *b) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_at(to)), "l"(map), "r"(x), "r"(y), "r"(shared_at(b)) : "memory");
}

// Copies bytes that lie one after the other: multiples of 16, from such an address.
__device__ __forceinline__ void copy_bytes(void *to, const void *from, unsigned bytes, Barrier *b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_at(to)), "l"(from), "r"(bytes), "r"(shared_at(b)) : "memory");
}

// Descriptor of an operand in shared memory in the 128-byte swizzle. `lead`: bytes between panels of 128 bytes along the
// dimension that is contiguous, where it is not K. Eight rows of 128 bytes follow the eight before.
__device__ __forceinline__ unsigned long long operand_of(unsigned start, int lead) {
    return (unsigned long long)start | (unsigned long long)(lead >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ unsigned long long operand(unsigned at, int lead = 16) { return operand_of(at >> 4, lead); }
__device__ __forceinline__ unsigned long long operand(const void *at, int lead = 16) {
    return operand_of(shared_at(at) >> 4 & 0x3FFF, lead);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers that all threads of a warpgroup release, or request.
template <int EACH>
__device__ __forceinline__ void registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(EACH));
}
template <int EACH>
__device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(EACH));
}
