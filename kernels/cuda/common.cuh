// Shared by every kernel here; prepended to each source. No CUDA header is included, as NVRTC's wheel has none.
// The step buffer's header: word 0 tokens (M), 1 sequences (S), 2 rows (R), 3 decode steps done in this run.

#define STEP_TOKENS(step) ((step)[0])
#define STEP_SEQS(step) ((step)[1])
#define STEP_ROWS(step) ((step)[2])
#define STEP_DONE(step) ((step)[3])
#define STEP_LOGPROBS(step) ((step)[6])
#define WARP 32
#define FULL 0xFFFFFFFFu
#define QUANT_FLOOR 1e-5f
#define INFINITY_F __int_as_float(0x7F800000)

struct f16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(f16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h.bits));
    return f;
}
__device__ __forceinline__ float to_float(float f) { return f; }
__device__ __forceinline__ void put(f16 *p, float f) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(f)); }
__device__ __forceinline__ void put(float *p, float f) { *p = f; }

#if WEIGHT_F16
typedef f16 weight_t;
#else
typedef float weight_t;
#endif

// Position in its sequence of token m.
__device__ __forceinline__ int token_position(const int *step, int token_seq, int seq_begin, int seq_len, int m) {
    int s = step[token_seq + m];
    return step[seq_len + s] - step[seq_begin + s + 1] + m;
}

struct Sum {
    static constexpr float identity = 0.0f;
    static __device__ float of(float a, float b) { return a + b; }
};
struct Max {
    static constexpr float identity = -3.4e38f;
    static __device__ float of(float a, float b) { return fmaxf(a, b); }
};

template <class Op>
__device__ __forceinline__ float warp_reduce(float value) {
    for (int i = WARP / 2; i > 0; i /= 2) value = Op::of(value, __shfl_xor_sync(FULL, value, i));
    return value;
}

// Over the block (WG threads, a multiple of a warp), the same in every thread.
template <class Op>
__device__ __forceinline__ float block_reduce(float value) {
    __shared__ float scratch[WARP];
    value = warp_reduce<Op>(value);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = value;
    __syncthreads();
    value = threadIdx.x % WARP < blockDim.x / WARP ? scratch[threadIdx.x % WARP] : Op::identity;
    return warp_reduce<Op>(value);
}

// Lets the next kernel start and fetch what does not depend on this one; it waits where it says so itself.
__device__ __forceinline__ void start_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Buffers that another kernel of the step writes may be touched only after this.
__device__ __forceinline__ void wait_for_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float4 vector_or_zero(const float *row, int k, int dim) {
    return k < dim / 4 ? ((const float4 *)row)[k] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Loads sixteen bytes that are read once, bypassing the first-level cache.
__device__ __forceinline__ uint4 stream(const uint4 *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// The address in shared memory of a pointer.
__device__ __forceinline__ unsigned shared_at(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies sixteen bytes to shared memory asynchronously; zeros where there is nothing to read. From Ampere on.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_at(to)), "l"(from), "r"(there ? 16 : 0));
}

// Makes a group of the copies since the last one; waits until all groups but the last PENDING are there.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Eight halves of sixteen bytes.
struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight expand(uint4 raw) {
    Eight out;
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out.v[2 * i] = to_float(f16{(unsigned short)words[i]});
        out.v[2 * i + 1] = to_float(f16{(unsigned short)(words[i] >> 16)});
    }
    return out;
}

// Four floats, rounded half to even and clamped, as the bytes of a word.
__device__ __forceinline__ int pack(float a, float b, float c, float d) {
    int high, all;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(high) : "r"(__float2int_rn(d)), "r"(__float2int_rn(c)));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(__float2int_rn(b)), "r"(__float2int_rn(a)), "r"(high));
    return all;
}

// What one unit of a row's integer products is worth, besides the activations' scale: f32 where a matrix has one scale, or, where
// ROW_SCALES, f16, one of each row. The contract rounds each product separately, and multiplies by the latter first.
#if ROW_SCALES
typedef f16 unit_t;
__device__ __forceinline__ float dequantize(int sum, float scale, float unit) {
    return __fmul_rn(__fadd_rn(__fmul_rn((float)sum, unit), 0.0f), scale);
}
#else
typedef float unit_t;
__device__ __forceinline__ float dequantize(int sum, float scale, float unit) {
    return __fmul_rn((float)sum, __fmul_rn(scale, unit));
}
#endif

__device__ __forceinline__ float4 times(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }
__device__ __forceinline__ float4 times(float4 v, float4 w) { return make_float4(v.x * w.x, v.y * w.y, v.z * w.z, v.w * w.w); }
__device__ __forceinline__ float squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ float magnitude(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Adds the four signed bytes of a word.
__device__ __forceinline__ int dot_ones(int word, int sum) { return __dp4a(word, 0x01010101, sum); }

// What the activation's sigmoid takes of a gate: itself or, where GELU, more, since (1 + tanh(z)) / 2 = sigmoid(2z).
__device__ __forceinline__ float gate_logit(float g) {
#if GELU
    return 1.5957691216f * g * fmaf(0.044715f * g, g, 1.0f);  // 2 sqrt(2 / pi)
#else
    return g;
#endif
}

// The activation between gate and up.
__device__ __forceinline__ float act(float g) {
#if RELU2
    float r = fmaxf(g, 0.0f);
    return r * r;
#else
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + expf(-gate_logit(g))));  // within 1 ulp, and 0 from 2^126 on
    return g * r;
#endif
}

// Sum over a warp, and maximum of non-negative numbers, whose bits order as they do.
__device__ __forceinline__ int warp_sum(int v) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(FULL, v);
#else
    for (int i = WARP / 2; i > 0; i /= 2) v += __shfl_xor_sync(FULL, v, i);
    return v;
#endif
}
__device__ __forceinline__ float warp_max(float v) {
#if __CUDA_ARCH__ >= 800
    return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(v)));
#else
    return warp_reduce<Max>(v);
#endif
}

// What products need of a row of int8 besides its scale: the sum of its elements or, where BOUND, the greatest sum of the
// magnitudes of a group of 128, of which each lane of a warp has four.
#if BOUND
__device__ __forceinline__ int add_to_row(int word, int most) { return max(most, (int)__reduce_add_sync(FULL, __dp4a(__vabs4(word), 0x01010101u, 0u))); }
__device__ __forceinline__ int row_of_warp(int most) { return most; }
__device__ __forceinline__ int row_of_parts(int a, int b) { return max(a, b); }
#else
__device__ __forceinline__ int add_to_row(int word, int sum) { return dot_ones(word, sum); }
__device__ __forceinline__ int row_of_warp(int sum) { return warp_sum(sum); }
__device__ __forceinline__ int row_of_parts(int a, int b) { return a + b; }
#endif

// Puts each thread's part of that together, and stores it with the row's scale.
template <int COUNT>
__device__ __forceinline__ void finish_row(int sum, float s, int *sums, float *scale) {
    __shared__ int parts[COUNT];
    sum = row_of_warp(sum);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < COUNT; w++) sum = row_of_parts(sum, parts[w]);
        *sums = sum;
        *scale = s;
    }
}

// RMSNorm's factor of a row. It takes the whole block.
__device__ __forceinline__ float inverse_rms(const float4 *row, int dim, float eps) {
    float sum = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < dim / 4; i += blockDim.x) sum += squares(row[i]);
    return 1.0f / sqrtf(block_reduce<Sum>(sum) / dim + eps);
}

// Vectors of a row of `dim` floats that each of `threads` holds: vector i of thread t is the row's t + i * threads.
#define VECTORS_OF(dim, threads) (((dim) / 4 + (threads) - 1) / (threads))

// A quotient within half a unit in the last place, in fewer instructions than a division.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, fmaf(-x, r, 1.0f), r);
}

// RMSNorm (where NORMED; `gain` is its weight) and absmax int8 of a row held so by COUNT warps: `put(k, word)` gets each
// vector's four bytes. Returns the scale. The norm is one factor of the whole row, so that the mean square and the greatest
// magnitude can be found together.
template <int COUNT, bool NORMED, int N, class Put>
__device__ __forceinline__ float norm_quant_row(float4 (&v)[N], const float4 (&gain)[N], int dim, float eps, Put put) {
    __shared__ __align__(16) float2 parts[COUNT];
    float sum = 0.0f, largest = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (NORMED) {
            sum += squares(v[i]);
            v[i] = times(v[i], gain[i]);
        }
        largest = fmaxf(largest, magnitude(v[i]));
    }
    if (NORMED) sum = warp_reduce<Sum>(sum);
    largest = warp_max(largest);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = make_float2(sum, largest);
    __syncthreads();
    sum = largest = 0.0f;
#pragma unroll
    for (int w = 0; w < COUNT; w++) {
        float2 part = parts[w];
        sum += part.x;
        largest = fmaxf(largest, part.y);
    }
    float inverse = NORMED ? rsqrtf(sum * (1.0f / dim) + eps) : 1.0f;
    largest = fmaxf(largest * inverse, QUANT_FLOOR);
    float factor = 127.0f * reciprocal(largest) * inverse;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float4 scaled = times(v[i], factor);
        put(threadIdx.x + i * COUNT * WARP, pack(scaled.x, scaled.y, scaled.z, scaled.w));
    }
    return largest * (1.0f / 127.0f);
}

// Cluster barrier: after each thread has waited, all have arrived, and their earlier writes are visible.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The counterpart of `mine` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ unsigned in_block(const void *mine, int rank) {
    unsigned at = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((unsigned)__cvta_generic_to_shared(mine)), "r"(rank));
#endif
    return at;
}

// Stores to the same place in block `rank` of the cluster.
__device__ __forceinline__ void store_word(const unsigned long long *place, unsigned long long word, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.b64 [%0], %1;" ::"r"(in_block(place, rank)), "l"(word) : "memory");
#endif
}

// A barrier in shared memory that opens when one thread has called expect_bytes, and so many have come from other blocks of the
// cluster. For one thread, before the cluster's blocks meet for the first time.
__device__ __forceinline__ void init_barrier(unsigned long long *barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
#endif
}
__device__ __forceinline__ void expect_bytes(unsigned long long *barrier, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void wait_for_bytes(unsigned long long *barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred open;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 open, [%0], 0;\n\t"
                 "@!open bra again;\n\t}" ::"r"((unsigned)__cvta_generic_to_shared(barrier))
                 : "memory");
#endif
}

// Makes this thread's writes to shared memory visible to copies that send_bytes starts.
__device__ __forceinline__ void before_sending() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Copies to the same place in block `rank` of the cluster, in the background; `barrier` there counts the bytes. Multiples of 16.
__device__ __forceinline__ void send_bytes(const void *from, unsigned bytes, int rank, unsigned long long *barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_block(from, rank)),
                 "r"((unsigned)__cvta_generic_to_shared(from)), "r"(bytes), "r"(in_block(barrier, rank))
                 : "memory");
#endif
}

// Stores to the shared memory of a block of the cluster, counted by a barrier there; both addresses are of in_block.
__device__ __forceinline__ void send(unsigned to, unsigned barrier, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void send(unsigned to, unsigned barrier, float2 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
#endif
}
