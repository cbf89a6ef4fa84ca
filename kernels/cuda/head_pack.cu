// The compact head: a matrix of halves in 4 bits a weight, with a bound on each score's error. Row n is stored as codes
// 0 ... 15: W[n, k] ~ column[k] * step[n] * (code - offset[k]). `column` evens out columns of unlike size, `step` is the greatest
// magnitude of the row, so evened, over 7.5, and `offset` is 7.5 plus a dither that does not depend on the weights, so that errors
// are uniform and independent (decision 0060 has the proof; kernels/cpu/head_layout.h is the same for the CPU).
//
// Sixteen bytes of codes are 32 columns: byte b has those at b (low bits) and at 16 + b. `norm` is the stored row's, without
// the column sizes.
#include "head.cuh"
#define SAMPLED 4096 /* rows, about, that a column's size is estimated from */
#define SLOTS 128
#define LANES 8 /* of 8 columns each */

// A block has 64 columns; SLOTS groups of its threads take rows by turns.
extern "C" __global__ void __launch_bounds__(SLOTS * LANES)
head_columns(const uint4 *weight, unsigned char *head, int rows) {
    __shared__ float sums[SLOTS][LANES * 8];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, stride = rows / SAMPLED + 1;
    float mine[8] = {};
    for (size_t n = (size_t)slot * stride; n < rows; n += (size_t)SLOTS * stride) {
        Eight v = expand(weight[n * (COLS / 8) + blockIdx.x * LANES + lane]);
#pragma unroll
        for (int d = 0; d < 8; d++) mine[d] += v.v[d] * v.v[d];
    }
#pragma unroll
    for (int d = 0; d < 8; d++) sums[slot][lane * 8 + d] = mine[d];
    __syncthreads();
    if (threadIdx.x >= LANES * 8) return;
    float sum = 0.0f;
    for (int s = 0; s < SLOTS; s++) sum += sums[s][threadIdx.x];
    float rms = sqrtf(sum / SAMPLED);
    ((float *)(head + head_columns_at(rows)))[blockIdx.x * LANES * 8 + threadIdx.x] = rms > 0.0f && rms < INFINITY_F ? rms : 1.0f;
}

// A warp a row.
extern "C" __global__ void head_pack(const uint4 *weight, unsigned char *head, int rows) {
    int n = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (n >= rows) return;
    const uint4 *row = weight + (size_t)n * (COLS / 8);
    const float *column = (const float *)(head + head_columns_at(rows));
    float largest = 0.0f;
    bool finite = true;
    for (int i = lane; i < COLS / 8; i += WARP) {
        Eight v = expand(row[i]);
#pragma unroll
        for (int d = 0; d < 8; d++) {
            float evened = fabsf(v.v[d] / column[8 * i + d]);
            largest = fmaxf(largest, evened);
            finite = finite && evened < INFINITY_F;
        }
    }
    float step = warp_reduce<Max>(largest) * (1.000001f / 7.5f);
    finite = __all_sync(FULL, finite);
    float inverse = finite && step > 0.0f ? 1.0f / step : 0.0f, squares = 0.0f;
    for (int i = lane; i < COLS / 8; i += WARP) {  // whole warps: COLS is a multiple of 256
        Eight v = expand(row[i]);
        unsigned codes[2] = {};
#pragma unroll
        for (int d = 0; d < 8; d++) {
            float offset = head_offset(8 * i + d);
            float code = rintf(fminf(fmaxf(v.v[d] / column[8 * i + d] * inverse + offset, 0.0f), 15.0f));
            squares += (code - offset) * (code - offset);
            codes[d / 4] |= (unsigned)code << (d % 4 * 8);
        }
        unsigned high[2] = {__shfl_down_sync(FULL, codes[0], 2), __shfl_down_sync(FULL, codes[1], 2)};
        if (lane % 4 < 2) {
            unsigned char *to = head + (size_t)n * (COLS / 2) + i / 4 * 16 + lane % 4 * 8;
            *(uint2 *)to = make_uint2(codes[0] | high[0] << 4, codes[1] | high[1] << 4);
        }
    }
    squares = warp_reduce<Sum>(squares);
    float stored = finite ? step : INFINITY_F;  // a weight is NaN: the row is always in doubt
    if (lane == 0) ((float2 *)(head + head_sizes_at(rows)))[n] = make_float2(stored, stored * sqrtf(squares) * 1.0001f);
}
