// Products of f32 numbers on the tensor cores, each as the sum of two TF32 numbers; what is lost is under 2^-21 of a product.
//
// Tensor cores round each sum towards zero, so long sums drift: Sums3 are to be put together (`of`) and added to others often.
// The order of the K of a product is free. Here a thread has two neighbouring columns where the instruction says q and q + 4. Then
// a thread's part of a result is its part of the operand A of the next product.

struct Split {
    unsigned high, low;
};

// The low part keeps all its bits: tensor cores do not read the last 13.
__device__ __forceinline__ Split split(float x) {
    unsigned high = (__float_as_uint(x) + 0x1000) & 0xFFFFE000;
    return {high, __float_as_uint(x - __uint_as_float(high))};
}

// 16 rows by 8 columns: rows group and group + 8, columns 2 * quarter and the next.
struct SplitTile {
    unsigned high[4], low[4];
};

// Splits a tile of results: a thread has both columns of its first row, then both of its second.
__device__ __forceinline__ SplitTile split_tile(const float (&c)[4]) {
    SplitTile tile;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        Split part = split(c[i % 2 * 2 + i / 2]);
        tile.high[i] = part.high, tile.low[i] = part.low;
    }
    return tile;
}

__device__ __forceinline__ void tf32_mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Sums of 16 rows with 8 columns, in three chains that do not wait for one another.
struct Sums3 {
    float parts[3][4];
    __device__ __forceinline__ void add(const SplitTile &a, float2 b) {
        Split x = split(b.x), y = split(b.y);
        tf32_mma(parts[0], a.high, x.high, y.high);
        tf32_mma(parts[1], a.low, x.high, y.high);
        tf32_mma(parts[2], a.high, x.low, y.low);
    }
    __device__ __forceinline__ float of(int i) const { return parts[0][i] + (parts[1][i] + parts[2][i]); }
};
