// Shared by the products of experts. Their codes are two's complement of the weights, so that a bit pair at the top of its byte is 64
// times the weight (sign_codes), and sums of products are 64-fold.
#define PLACE_BYTES 256 /* columns that a warp takes at a time: 16 bytes of codes for each of four lanes of a row */
#define STRIDE (COLS + 64) /* of rows of x in shared memory, so that neighbours fall into different halves of the banks */

// Place in shared memory of the 16 bytes of x at 16 * unit: what four lanes take at a time is side by side.
__device__ __forceinline__ int place(int unit) { return (unit & ~14) | (unit & 6) << 1 | (unit >> 2 & 2); }

__device__ __forceinline__ void mma(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One bit pair of every byte, moved to the byte's top.
__device__ __forceinline__ uint4 pairs_at(uint4 w, int shift) {
    const unsigned mask = 0xC0C0C0C0u;
    return make_uint4(w.x << shift & mask, w.y << shift & mask, w.z << shift & mask, w.w << shift & mask);
}

// The value of 64-fold sums of a row's products, as the contract rounds it.
__device__ __forceinline__ float value_of(int sum, float scale, unit_t unit) { return dequantize(sum >> 6, scale, to_float(unit)); }

// The stacked matrices' row for row n of an expert's result: `parts` matrices of `rows` rows for each of EXPERTS.
__device__ __forceinline__ size_t matrix_row(int n, int expert, int rows) { return ((size_t)(n / rows) * EXPERTS + expert) * rows + n % rows; }
