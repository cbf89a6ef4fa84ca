// ternary_gemm on the matrix units: BM rows of W by BN tokens a work-group, 128 of K at a time through a ring of STAGES tiles in
// local memory that is filled ahead in the background. WARPS_N warps share the rows, WARPS_M the tokens.
//
// A tile of W is its codes as they lie, 32 bytes a row. A work-item takes words q and q + 4 of a row, one bit pair after the other
// (four neighbours of K each), so that a bit pair of all eight words is a step of 32 of K. The units of 16 bytes of a token, and the
// two of a row of codes, are exchanged from row to row so that what a warp loads at a time falls into all banks.
// GLU: as in ternary_decode, every 16 rows are 8 gates and their 8 ups.
// GROUP: columns that share a scale of a row: 32, 64, or a multiple of 128, or all; 0: one scale for all rows of a matrix.
#include "nvidia/warps.clh"

#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately

#define THREADS (WARP * WARPS_N * WARPS_M)
#define ROW_TILES (BM / WARPS_N / 16) /* of a warp */
#define PAIRS (BN / WARPS_M / 16)     /* of its tiles of 8 tokens */
#define BLOCKS (ROW_BYTES / 32)
#define STAGE (BN * 8 + BM * 2) /* units of 16 bytes */
#define X_AT(r, unit) ((r) * 8 + ((unit) ^ (r) % 8))
#define CODE_AT(r, unit) (BN * 8 + (r) * 2 + ((unit) ^ (r) / 4 % 2))
#define ROW(r) (GLU ? n0 / 2 + (r) / 16 * 8 + (r) % 8 + ((r) % 16 < 8 ? 0 : rows / 2) : n0 + (r))
#if GROUP
#include "groups.clh"
#include "group_terms.clh"
#define MULTIPLY mma_signed
#define CODES_OF(word, plane) TOP_PAIRS(word, plane)
#define UNIT_OF(r, s) (THERE(r) && s < COUNT ? half_of(((global const ushort *)w_scale)[(size_t)ROW(r) * COUNT + s]) : 0.0f)
#define SETS (COUNT > 1 && GROUP < 128 ? 128 / GROUP : 1) /* groups of a block of 128 columns, or the one of */
#define SPAN ((GROUP + 127) / 128)                        /* so many blocks */
#else
#define MULTIPLY mma_int8
#define CODES_OF(word, plane) ((word) >> (6 - 2 * (plane)) & 0x03030303u)
#endif
#define THERE(r) (GLU ? n0 / 2 + (r) / 16 * 8 + (r) % 8 < rows / 2 : n0 + (r) < rows)

inline void fetch(local uint4 *ring, int block, global const char *x, global const uint4 *codes, int m0, int n0, int tokens, int rows) {
    local uint4 *stage = ring + block % STAGES * STAGE;
    for (int i = get_local_id(0); i < BN * 8; i += THREADS) {
        int m = i / 8, k = block * 128 + i % 8 * 16, there = m0 + m < tokens && k < COLS;
        copy_async(stage + X_AT(m, i % 8), x + (there ? (size_t)(m0 + m) * COLS + k : 0), there);
    }
    for (int i = get_local_id(0); i < BM * 2; i += THREADS) {
        int r = i / 2, there = THERE(r);
        copy_async(stage + CODE_AT(r, i % 2), codes + (there ? ((size_t)ROW(r) * BLOCKS + block) * 2 + i % 2 : 0), there);
    }
}

kernel __attribute__((reqd_work_group_size(THREADS, 1, 1))) OF_WARPS void ternary_gemm_mma(
    global const int *step, global const char *x, global const float *scale, global const int *x_sums, global const uint4 *codes,
    global const void *w_scale, global float *out, int rows) {
    local uint4 ring[STAGES * STAGE];
    int item = get_local_id(0), warp = item / WARP, lane = item % WARP, group = lane / 4, quarter = lane % 4;
    int row0 = warp % WARPS_N * (BM / WARPS_N), token0 = warp / WARPS_N * (BN / WARPS_M);
    int n0 = get_group_id(0) * BM, m0 = get_group_id(1) * BN, tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    for (int block = 0; block < STAGES - 1; block++) {
        if (block < BLOCKS) fetch(ring, block, x, codes, m0, n0, tokens, rows);
        COPY_COMMIT;
    }
    int4 sums[ROW_TILES][2 * PAIRS];
#if GROUP
    float4 total[ROW_TILES][2 * PAIRS];
#endif
    UNROLL
    for (int t = 0; t < ROW_TILES; t++)
        UNROLL
        for (int n = 0; n < 2 * PAIRS; n++) {
#if GROUP
            total[t][n] = (float4)(0.0f);
#else
            sums[t][n] = (int4)(0);
#endif
        }
    for (int block = 0; block < BLOCKS; block++) {
        COPY_WAIT(AHEAD);
        barrier(CLK_LOCAL_MEM_FENCE);
        if (block + STAGES - 1 < BLOCKS) fetch(ring, block + STAGES - 1, x, codes, m0, n0, tokens, rows);
        COPY_COMMIT;
        local const uint4 *stage = ring + block % STAGES * STAGE;
#if GROUP
        float units[SETS][ROW_TILES][2];
        UNROLL
        for (int i = 0; i < SETS * ROW_TILES * 2; i++) {
            int r = row0 + i / 2 % ROW_TILES * 16 + i % 2 * 8 + group, s = block / SPAN * SETS + i / 2 / ROW_TILES;
            units[i / 2 / ROW_TILES][i / 2 % ROW_TILES][i % 2] = UNIT_OF(r, s);
        }
#endif
        uint words[ROW_TILES][4];
        UNROLL
        for (int t = 0; t < ROW_TILES; t++) {
            UNROLL
            for (int i = 0; i < 4; i++)
                words[t][i] = ((local const uint *)(stage + CODE_AT(row0 + t * 16 + i % 2 * 8 + group, i / 2)))[quarter];
#if GROUP
            UNROLL
            for (int i = 0; i < 4; i++) words[t][i] = SIGNED_CODES(words[t][i]);
#endif
        }
        UNROLL
        for (int plane = 0; plane < 4; plane++) {
#if GROUP
            if (plane % (4 / SETS) == 0 && block % SPAN == 0) {
                UNROLL
                for (int n = 0; n < ROW_TILES * 2 * PAIRS; n++) sums[n / (2 * PAIRS)][n % (2 * PAIRS)] = (int4)(START);
            }
#endif
            uint a[ROW_TILES][4];
            UNROLL
            for (int t = 0; t < ROW_TILES; t++)
                UNROLL
                for (int i = 0; i < 4; i++) a[t][i] = CODES_OF(words[t][i], plane);
            UNROLL
            for (int n = 0; n < PAIRS; n++) {
                // Matrices: tokens 0 ... 7 with the plane's first 16 of K, with its last, and tokens 8 ... 15 likewise.
                int r = token0 + n * 16 + lane / 16 * 8 + lane % 8;
                uint4 b = load_matrices(stage + X_AT(r, plane * 2 + lane / 8 % 2));
                UNROLL
                for (int t = 0; t < ROW_TILES; t++) {
                    sums[t][2 * n] = MULTIPLY(sums[t][2 * n], a[t][0], a[t][1], a[t][2], a[t][3], b.x, b.y);
                    sums[t][2 * n + 1] = MULTIPLY(sums[t][2 * n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b.z, b.w);
                }
            }
#if GROUP
            if ((plane + 1) % (4 / SETS) || ((block + 1) % SPAN && block + 1 < BLOCKS)) continue;
            UNROLL
            for (int t = 0; t < ROW_TILES; t++) {
                float low = units[plane * SETS / 4][t][0], high = units[plane * SETS / 4][t][1];
                UNROLL
                for (int n = 0; n < 2 * PAIRS; n++) {
                    total[t][n].x = add_term(total[t][n].x, sums[t][n].x, low), total[t][n].y = add_term(total[t][n].y, sums[t][n].y, low);
                    total[t][n].z = add_term(total[t][n].z, sums[t][n].z, high), total[t][n].w = add_term(total[t][n].w, sums[t][n].w, high);
                }
            }
#endif
        }
    }
    UNROLL
    for (int t = 0; t < ROW_TILES; t++) {
        int r = row0 + t * 16 + group, n_low = ROW(r), n_high = ROW(r + 8), low_there = THERE(r), high_there = THERE(r + 8);
#if GROUP
#define FOUND total[t][n]
#define VALUE(sum, unit) ((sum) * (scale[m] * UNFOLD))
#else
        float unit_low = low_there ? ((global const float *)w_scale)[n_low] : 0.0f;
        float unit_high = high_there ? ((global const float *)w_scale)[n_high] : 0.0f;
#define FOUND sums[t][n]
#define VALUE(sum, unit) ((float)((sum) - x_sums[m]) * (scale[m] * (unit)))
#endif
        UNROLL
        for (int n = 0; n < 2 * PAIRS; n++) {
            UNROLL
            for (int i = 0; i < 2; i++) {
                int m = m0 + token0 + n * 8 + quarter * 2 + i;
                if (m >= tokens) continue;
                float low = VALUE(i ? FOUND.y : FOUND.x, unit_low), high = VALUE(i ? FOUND.w : FOUND.z, unit_high);
#if GLU
                if (low_there) out[(size_t)m * (rows / 2) + n_low] = act(low) * high;
#elif ADD
                if (low_there) out[(size_t)m * rows + n_low] += low;
                if (high_there) out[(size_t)m * rows + n_high] += high;
#else
                if (low_there) out[(size_t)m * rows + n_low] = low;
                if (high_there) out[(size_t)m * rows + n_high] = high;
#endif
            }
        }
    }
}
