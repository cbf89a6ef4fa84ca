// Products of rows with the matrices of the experts that they are routed to, of any shape. A pair is a token and one of its experts.
//
// A block has ROWS rows of one expert's matrices and up to TOKENS pairs of that expert: one, or those of a tile of expert_tiles.
// LANES threads share a row; each takes blocks of 128 columns and adds its integer sums to those of the groups of columns, in any order,
// as they are exact. GROUP: columns of a scale, f16, of each row; 0: `units` are those of whole rows. EACH: groups of a block; 1 where
// a group has one or more blocks.
#include "expert.cuh"
#define COUNT (GROUP ? COLS / (GROUP ? GROUP : COLS) : 1)
#define BLOCKS (ROW_BYTES / 32)
#define ROWS (WG / LANES)

// 16 activations from column k on; zeros beyond COLS.
__device__ __forceinline__ int4 load_x(const signed char *row, int k) {
    auto word = [&](int at) { return at < COLS ? *(const int *)(row + at) : 0; };
    return make_int4(word(k), word(k + 4), word(k + 8), word(k + 12));
}
__device__ __forceinline__ int dot16(uint4 w, int4 v, int sum) {
    return __dp4a((int)w.w, v.w, __dp4a((int)w.z, v.z, __dp4a((int)w.y, v.y, __dp4a((int)w.x, v.x, sum))));
}

// `per`: pairs that share a row of x and its scale. Results of a pair begin at `first` of its `columns`.
extern "C" __global__ void __launch_bounds__(WG)
expert_matmul(const int *step, const signed char *x, const float *scale, const int *ids, const uint4 *codes, const void *units,
              const int *order, const int *tiles, float *out, int top, int per, int rows, int parts, int first, int columns) {
    __shared__ int sums[ROWS * TOKENS * COUNT];
    int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES, here = blockIdx.x * ROWS, total = rows * parts;
    start_dependents();
    wait_for_before();
#if GROUPED
    int count = tiles[3 * blockIdx.y + 2];
    if (count == 0) return;  // nobody wrote the rest of the tile
    int expert = tiles[3 * blockIdx.y], begin = tiles[3 * blockIdx.y + 1];
    auto pair_of = [&](int t) { return order[begin + t]; };
#else
    const int begin = blockIdx.y, count = 1;
    if (begin >= STEP_TOKENS(step) * top) return;
    int expert = ids[begin];
    auto pair_of = [&](int) { return begin; };
#endif
    for (int i = threadIdx.x; i < ROWS * TOKENS * COUNT; i += WG) sums[i] = 0;
    __syncthreads();
    const uint4 *row = codes + matrix_row(min(here + slot, total - 1), expert, rows) * (ROW_BYTES / 16);
    for (int block = lane; block < BLOCKS; block += LANES) {
        uint4 low = row[2 * block], high = row[2 * block + 1];
        for (int t = 0; t < count; t++) {
            const signed char *of = x + (size_t)(pair_of(t) / per) * COLS;
            int found = 0;
#pragma unroll
            for (int plane = 0; plane < 4; plane++) {
                int k = block * 128 + plane * 32;
                found = dot16(pairs_at(high, 2 * plane), load_x(of, k + 16), dot16(pairs_at(low, 2 * plane), load_x(of, k), found));
                if ((plane + 1) % (4 / EACH)) continue;
                int s = GROUP ? (block * 128 + plane / (4 / EACH) * (128 / EACH)) / (GROUP ? GROUP : 1) : 0;
                if (s < COUNT) atomicAdd(sums + (slot * TOKENS + t) * COUNT + s, found);
                found = 0;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * TOKENS; i += WG) {
        int t = i % TOKENS, n = here + i / TOKENS;
        if (t >= count || n >= total) continue;
        int pair = pair_of(t);
        size_t of = matrix_row(n, expert, rows);
        float unit = scale[pair / per];
#if GROUP
        float value = 0.0f;
        for (int s = 0; s < COUNT; s++) {
            value = __fadd_rn(value, __fmul_rn((float)(sums[i * COUNT + s] >> 6), to_float(((const f16 *)units)[of * COUNT + s])));
        }
        value = __fmul_rn(value, unit);
#else
        float value = value_of(sums[i], unit, ((const unit_t *)units)[of]);
#endif
        out[(size_t)pair * columns + first + n] = value;
    }
}
