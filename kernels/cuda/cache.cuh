// The paged cache: block after block, each with its keys or values [kv_heads][BLOCK][DIM]. A head's part of a block is
// contiguous, because interleaving rows of different heads makes memory slower. In int8 the elements are codes, stored
// with 128 added, and a head's codes in a block are followed by the scales of its rows, f32 [BLOCK].
#define CODES_BIAS 128
#define MIN_ROW 1e-30f /* a row of lesser magnitudes is stored as zeros */

#if KV_I8
struct i8 {
    unsigned char bits;
};
typedef i8 kv_t;

__device__ __forceinline__ float to_float(i8 c) { return (float)((int)c.bits - CODES_BIAS); }
__device__ __forceinline__ void put(i8 *p, float f) { p->bits = __float2int_rn(fminf(fmaxf(f, -127.0f), 127.0f)) + CODES_BIAS; }
#elif KV_F16
typedef f16 kv_t;
#else
typedef float kv_t;
#endif

// Place of a position's row: the index of its first element.
__device__ __forceinline__ size_t row_of(int block, int slot, int kv_head, int kv_heads) {
#if KV_I8
    return (size_t)(block * kv_heads + kv_head) * (BLOCK * (DIM + 4)) + slot * DIM;
#else
    return ((size_t)(block * kv_heads + kv_head) * BLOCK + slot) * DIM;
#endif
}

#if KV_I8
// Place of its scale.
__device__ __forceinline__ float *scale_of(const kv_t *cache, int block, int slot, int kv_head, int kv_heads) {
    return (float *)(cache + row_of(block, BLOCK, kv_head, kv_heads)) + slot;
}

// How a row of k or v becomes codes: each value times `factor`. Its scale is NaN where not all values are finite.
struct RowUnit {
    float scale, factor;
};

// The scale and factor of a row that a warp holds, N times four values a lane.
template <int N>
__device__ __forceinline__ RowUnit row_unit(const float (&v)[N][4]) {
    unsigned bits = 0;  // of magnitudes, ordered as they are, NaN above all
#pragma unroll
    for (int i = 0; i < 4 * N; i++) bits = max(bits, __float_as_uint(fabsf(v[i / 4][i % 4])));
#if __CUDA_ARCH__ >= 800
    bits = __reduce_max_sync(FULL, bits);
#else
    for (int i = WARP / 2; i > 0; i /= 2) bits = max(bits, __shfl_xor_sync(FULL, bits, i));
#endif
    float largest = __uint_as_float(bits);
    if (!(largest < INFINITY_F)) return {__int_as_float(0x7FC00000), 0.0f};
    return largest < MIN_ROW ? RowUnit{0.0f, 0.0f} : RowUnit{largest / 127.0f, 127.0f / largest};
}

// Codes in the bytes 0 and 1, or 2 and 3, of a word as two halves, exactly: 1024 + code + 128, less 1152.
template <int FIRST>
__device__ __forceinline__ unsigned code_halves(unsigned word) {
    unsigned out, biased = __byte_perm(word, 0x64646464, FIRST ? 0x4342 : 0x4140);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(biased), "r"(0x64806480));
    return out;
}

// Eight codes as halves.
__device__ __forceinline__ uint4 code_halves(unsigned low, unsigned high) {
    return make_uint4(code_halves<0>(low), code_halves<2>(low), code_halves<0>(high), code_halves<2>(high));
}

// q is multiplied by this, and the scales of keys are divided: halves of q stay normal where keys are large.
#define Q_UNIT 8.0f

// log2 of the scale of a row of v, which is added to the exponent of a weight. The running maximum is then that of weights times
// scales, so their halves neither overflow nor vanish, whatever the scale.
__device__ __forceinline__ float exponent(float scale) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(scale < MIN_ROW ? MIN_ROW : scale));  // NaN stays
    return y;
}
#else
#define Q_UNIT 1.0f
#endif
