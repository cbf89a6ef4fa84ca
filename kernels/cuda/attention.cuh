// Shared by the attention kernels.
#include "window.cuh"

// Two floats as halves, the first in the low 16 bits.
__device__ __forceinline__ unsigned halves(float low, float high) {
    unsigned out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ float power(float x) {  // of 2; 0 for what would be less than the normal numbers
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Tokens of a prompt that a block attends with.
struct TokenTile {
    int seq, end;                 // its sequence, and the end of that sequence's tokens
    int first, position, length;  // its first token, that one's position, and the positions its tokens see between them
};

// This block's tile and sequence: tiles are counted over the sequences, each of which begins with a new one. The
// last come first, as those of one sequence take the longest. False for a surplus block.
__device__ __forceinline__ bool find_tile(TokenTile &found, const int *step, int seq_begin, int seq_len, int size) {
    int seqs = STEP_SEQS(step), seq = 0, tile = -1 - (int)blockIdx.y, begin = 0, end = 0;
    auto tiles_of = [&](int s) {
        begin = step[seq_begin + s], end = step[seq_begin + s + 1];
        return (end - begin + size - 1) / size;
    };
    for (int s = 0; s < seqs; s++) tile += tiles_of(s);
    if (tile < 0) return false;
    for (int count; tile >= (count = tiles_of(seq)); seq++) tile -= count;
    int first = begin + tile * size, position = step[seq_len + seq] - end + first;
    found = {seq, end, first, position, min(step[seq_len + seq], position + size)};
    return true;
}
