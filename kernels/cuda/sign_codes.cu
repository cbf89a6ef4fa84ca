// Codes 0, 1 and 2 become the two's complement of their weights -1, 0 and 1, in place. Runs once for each matrix that has scales of
// groups, before its first product.
__device__ __forceinline__ unsigned as_signed(unsigned codes) { return ~codes & (~(codes << 1) | 0x55555555u); }

extern "C" __global__ void __launch_bounds__(256) sign_codes(uint4 *codes, int count) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    uint4 w = codes[i];
    codes[i] = make_uint4(as_signed(w.x), as_signed(w.y), as_signed(w.z), as_signed(w.w));
}
