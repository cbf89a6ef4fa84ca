// What delta_prepare leaves to delta_chunks, for each value head of a chunk of CHUNK tokens of a sequence, with c the running sums of
// the logarithms of its decays:
//   solve[i][j]   (I + A)^-1 times the strength of token j, where A[i][j] = strength_i (k_i . k_j) e^(c_i - c_j) below the diagonal
//   weigh[i][j]   (q_i . k_j) e^(c_i - c_j), j up to i
//   factors       [4][CHUNK]: e^(c_i) / |k_i|, e^(c_i) / (|q_i| sqrt(D_K)), e^(c_last - c_i) / |k_i|, and e^(c_last)
#include "tf32.cuh"
#define CHUNK 64
#define PAIR (2 * CHUNK * CHUNK) /* elements of both matrices */
#define KEYS (K_HEADS * D_K)
#define WIDTH (2 * KEYS + HEADS * D_V)

// Rows of matrices in shared memory have their columns in this order, so that neither eight of a row nor eight rows of a column meet in
// a bank. Four columns stay together.
__device__ __forceinline__ int swizzle(int row) { return ((row ^ row >> 1) & 3) * 8; }

// Whether the step has so many tokens of a sequence that they are taken in chunks. The first chunk of sequence s has the place
// begin / CHUNK + s, others follow.
__device__ __forceinline__ bool in_chunks(int begin, int end) { return end - begin >= MIN_TOKENS; }

// Copies the q and k of a chunk to shared memory, [2][CHUNK][D_K]; zeros past its tokens.
template <int THREADS>
__device__ __forceinline__ void copy_heads(float *to, const float *qkv, int key_head, int first, int count) {
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * CHUNK * (D_K / 4); i += THREADS) {
        int row = i / (D_K / 4) % CHUNK, kind = i / (CHUNK * (D_K / 4)), column = i % (D_K / 4) * 4;
        bool there = row < count;
        const float *from = qkv + (size_t)(first + (there ? row : 0)) * WIDTH + kind * KEYS + key_head * D_K + column;
        copy_async(to + (kind * CHUNK + row) * D_K + (column ^ swizzle(row)), from, there);
    }
    copies_commit();
}
