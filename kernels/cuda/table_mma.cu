// dense_matmul of a ternary table with a scale for each GROUP of columns (64 or 128), on the tensor cores.
//
// A mask makes a bit pair of two bytes of a word the last digits of two halves from 1,024 on, and one fused multiplication and addition makes
// weights of these. split_units has prepared x: as the sum of two halves, in the order of columns that this gives.
//
// A warp takes tile after tile of 32 rows; the codes of its next 512 columns are on their way. TOKENS rows of x are two columns of the
// product each. They are in shared memory as a whole, so that no warp waits for another, or, where STAGED, 512 columns at a time.
#include "dense.cuh"
#include "table_mma.cuh"
#define CHUNK 512
#define BLOCKS (CHUNK / 128)
#define CHUNKS (COLS / CHUNK)
#define SETS (128 / UNIT) /* units of 128 columns */
#define NT ((TOKENS + 3) / 4)
#define X_COLS (STAGED ? CHUNK : COLS) /* of x in shared memory, and on their way there */
#define PITCH (X_COLS / 8 + 4) /* of a half row of x, in 16 bytes: an odd number of 64 bytes, so that neighbours fall into different banks */
#define STAGE (2 * TOKENS * PITCH)
#if GROUP == 64
typedef uint4 Scales; /* of a row and CHUNK columns */
#else
typedef uint2 Scales;
#endif

__device__ __forceinline__ uint2 fetch_codes(const uint2 *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// The weights of a bit pair of two bytes of a word, as halves. `bias` is 1,024 twice.
__device__ __forceinline__ unsigned weights_at(unsigned word, int pair, unsigned bias) {
    const unsigned factors[] = {0x3C003C00, 0x34003400, 0x2C002C00, 0x24002400};  // 4^-pair, twice
    const unsigned rests[] = {0xE401E401, 0xDC04DC04, 0xD410D410, 0xCC40CC40};    // -(1024 * 4^-pair + 1), twice
    unsigned biased = word & 0x00030003u << 2 * pair | bias, out;                 // 1024 + (weight + 1) * 4^pair
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(biased), "r"(factors[pair]), "r"(rests[pair]));
    return out;
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
table_mma(const int *step, const uint4 *split, const float *units, const uint2 *codes, const f16 *w_scale, float *out, int rows) {
    extern __shared__ uint4 x[];                          // [1 + STAGED][2 * TOKENS][PITCH]
    float *params = (float *)(x + (1 + STAGED) * STAGE);  // [TOKENS][UNITS]
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, group = lane / 4, quarter = lane % 4;
    int tile = blockIdx.x * WARPS + warp, stride = gridDim.x * WARPS, tiles = (rows + 31) / 32, first = blockIdx.y * TOKENS, turn = 0;
    const uint2 *from[4];  // the codes that are fetched next, of rows group + 8 h of a tile, and their scales
    const Scales *scales_from[4];
    uint2 code[BLOCKS][4];
    Scales scales[4];
    auto begin = [&](int tile) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            size_t row = min(tile * 32 + h * 8 + group, rows - 1);
            from[h] = codes + row * (COLS / 32) + quarter, scales_from[h] = (const Scales *)(w_scale + row * (COLS / GROUP));
        }
    };
    auto fetch = [&](int block) {
#pragma unroll
        for (int h = 0; h < 4; h++) code[block][h] = fetch_codes(from[h] + block * 4);
    };
    begin(min(tile, tiles - 1));
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) fetch(b);
#pragma unroll
    for (int h = 0; h < 4; h++) scales[h] = *scales_from[h];
    start_dependents();
    wait_for_before();
    int count = min(STEP_ROWS(step) - first, TOKENS);
    if (count <= 0) return;
    auto fetch_x = [&](int turn) {  // of those that have X_COLS of x each
        uint4 *to = x + turn % 2 * STAGE;
        const uint4 *from = split + (size_t)first * 2 * (COLS / 8) + turn % (COLS / X_COLS) * (X_COLS / 8);
        for (int i = threadIdx.x; i < 2 * TOKENS * (X_COLS / 8); i += WARPS * WARP) {
            int n = i / (X_COLS / 8), at = i % (X_COLS / 8);
            copy_async(to + n * PITCH + at, from + (size_t)min(n, 2 * count - 1) * (COLS / 8) + at, true);
        }
    };
    fetch_x(0);
    for (int i = threadIdx.x; i < TOKENS * UNITS; i += WARPS * WARP) {
        params[i] = units[(size_t)(first + min(i / UNITS, count - 1)) * UNITS + i % UNITS];
    }
#if !STAGED
    asm volatile("cp.async.wait_all;");
    __syncthreads();
#endif

    unsigned bias = 0x64006400u | (unsigned)rows >> 31;  // kept from the compiler: an instruction has one constant, which the mask is
    int row_of_x[NT], row_of_params[NT];
#pragma unroll
    for (int t = 0; t < NT; t++) {
        row_of_x[t] = min(t * 8 + group, 2 * TOKENS - 1) * PITCH + quarter;
        row_of_params[t] = min(t * 4 + quarter, TOKENS - 1) * UNITS;
    }
    for (int begun = blockIdx.x * WARPS; begun < tiles; begun += stride, tile += stride) {
        float sums[NT][2][2] = {};  // of token quarter + 4 t, rows group and group + 8 of each half of the tile
#pragma unroll 1
        for (int c = 0; c < CHUNKS; c++) {
            Scales now[4];
#if STAGED
            asm volatile("cp.async.wait_all;");
            __syncthreads();
            fetch_x(turn + 1);
#endif
            const uint4 *of_x = x + (STAGED ? turn++ % 2 * STAGE : c * (CHUNK / 8));
            if (c + 1 < CHUNKS) {
#pragma unroll
                for (int h = 0; h < 4; h++) from[h] += CHUNK / 32, scales_from[h]++;
            } else {
                begin(min(tile + stride, tiles - 1));
            }
            bool more = c + 1 < CHUNKS || tile + stride < tiles;
#pragma unroll
            for (int h = 0; h < 4; h++) {
                now[h] = scales[h];
                if (more) scales[h] = *scales_from[h];
            }
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                uint2 words[4];
#pragma unroll
                for (int h = 0; h < 4; h++) words[h] = code[b][h];
                if (more) fetch(b);
                float parts[NT][SETS][2][4] = {};
#pragma unroll
                for (int load = 0; load < 4; load++) {
                    uint2 weights[4][2];  // of one word of each of two rows: two bit pairs of two halves of the tile
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int pair = load % 2 * 2 + i % 2;
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            unsigned word = load / 2 ? words[i / 2 * 2 + r].y : words[i / 2 * 2 + r].x;
                            weights[i][r] = make_uint2(weights_at(word, pair, bias), weights_at(word >> 8, pair, bias));
                        }
                    }
#pragma unroll
                    for (int t = 0; t < NT; t++) {
                        uint4 v = of_x[row_of_x[t] + (b * 4 + load) * 4];
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            const int set = SETS - 1 - (load % 2 * 2 + i % 2) * SETS / 4;
                            f16_mma(parts[t][set][i / 2], weights[i][0], weights[i][1], i % 2 ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y));
                        }
                    }
                }
#pragma unroll
                for (int s = 0; s < SETS; s++) {
#pragma unroll
                    for (int h = 0; h < 4; h++) {
                        float scale = to_float(((const f16 *)&now[h])[b * SETS + s]);
#pragma unroll
                        for (int t = 0; t < NT; t++) {
                            const float(&of)[4] = parts[t][s][h / 2];
                            float undo = params[row_of_params[t] + (c * BLOCKS + b) * SETS + s];
                            sums[t][h / 2][h % 2] += (of[h % 2 * 2] + of[h % 2 * 2 + 1]) * scale * undo;
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int t = 0; t < NT; t++) {
#pragma unroll
            for (int h = 0; h < 4; h++) {
                int row = tile * 32 + h * 8 + group, token = t * 4 + quarter;
                if (row < rows && token < count) out[(size_t)(first + token) * rows + row] = sums[t][h / 2][h % 2];
            }
        }
    }
}
