// Products of a warpgroup with few columns: NT times 8, of signed bytes in shared memory. A_TYPE: of the rows' bytes, "u8" or "s8".
#include "wgmma.cuh"
#define PRODUCT(shape, sums, rest, ...)                                                            \
    asm volatile("wgmma.mma_async.sync.aligned." shape ".s32." A_TYPE ".s8 {" sums "}, " rest ";" \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "n"(ADDED))

// acc = a (64 rows by 32 of K, in registers) times the columns that `x` describes; plus acc, where there are sums yet.
template <int ADDED = 1>
__device__ __forceinline__ void multiply(int (&acc)[NT][4], const unsigned (&a)[4], unsigned long long x) {
#if NT == 8
    PRODUCT("m64n64k32", NAMES32, "{%32,%33,%34,%35}, %36, %37", ACC4(0), ACC4(4));
#elif NT == 4
    PRODUCT("m64n32k32", NAMES16, "{%16,%17,%18,%19}, %20, %21", ACC4(0));
#elif NT == 2
    PRODUCT("m64n16k32", NAMES8, "{%8,%9,%10,%11}, %12, %13", ACC(0), ACC(1));
#else
#error "no such number of columns"
#endif
}

// Waits for all products; only then may their sums be read.
__device__ __forceinline__ void products_end(int (&acc)[NT][4]) {
    products_wait<0>();
#pragma unroll
    for (int n = 0; n < NT; n++) asm volatile("" : ACC(n));
}

// Keeps the compiler from expanding some of the operands between two products, where it would have to wait for them.
__device__ __forceinline__ void expanded(unsigned (&a)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]));
}
