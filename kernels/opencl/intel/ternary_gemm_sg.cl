// ternary_matmul for many tokens on Intel's GPUs: a sub-group multiplies M_BLOCKS * 8 tokens by N_BLOCKS * SG rows of W, each work-item
// having one row of each block. Nothing goes through local memory, and no work-item waits for another.
//
// A step of the product is 8 tokens by SG rows over 32 of K. A row's 32 bytes of codes, as ternary_decode has them, hold at each bit
// pair 32 neighbours of K: what a work-item has to bring to a step, eight words.
//
// activation_tiles comes first. It puts the activations of a step side by side, so that one block read loads them: 8 tokens by 32
// bytes, [M / 8][K / 32][8][32]. Past the last token or column there are zeros.
#pragma OPENCL FP_CONTRACT OFF  // the contract rounds each product and the sum of `add` separately
#include "intel/sub_groups.clh"

#define M_BLOCKS (XMX ? 4 : 2) /* dot products take more registers besides */
#define N_BLOCKS 2
#define SUB_GROUPS 4 /* of a work-group: each has rows of its own */
#define BLOCK_K (ROW_BYTES / 8) /* steps of 32 of K */
#define STEP_BYTES 256

// Grid: [steps of K, blocks of 8 tokens]; a work-item has a word.
kernel __attribute__((reqd_work_group_size(64, 1, 1))) void activation_tiles(
    global const int *step, global const uint *x, global uint *tiles) {
    int k_step = get_group_id(0), block = get_group_id(1), item = get_local_id(0);
    int m = block * 8 + item / 8, word = k_step * 8 + item % 8;
    int there = m < STEP_TOKENS(step) && word < COLS / 4;
    tiles[((size_t)block * BLOCK_K + k_step) * (STEP_BYTES / 4) + item] = there ? x[(size_t)m * (COLS / 4) + word] : 0;
}

// Grid: [groups of SUB_GROUPS * N_BLOCKS * SG rows, groups of M_BLOCKS * 8 tokens].
kernel __attribute__((reqd_work_group_size(SUB_GROUPS * SG, 1, 1), intel_reqd_sub_group_size(SG))) void ternary_gemm_sg(
    global const int *step, global const uchar *tiles, global const float *scale, global const int *x_sums,
    global const uint8 *codes, global const float *w_scale, global float *out, int rows) {
    int n0 = (get_group_id(0) * SUB_GROUPS + get_sub_group_id()) * (N_BLOCKS * SG) + get_sub_group_local_id();
    int m0 = get_group_id(1) * (M_BLOCKS * 8), tokens = STEP_TOKENS(step);
    if (m0 >= tokens) return;
    int8 sums[N_BLOCKS][M_BLOCKS];
    global const uint8 *row[N_BLOCKS];
    global const uchar *from[M_BLOCKS];
    UNROLL
    for (int i = 0; i < N_BLOCKS; i++) {
        row[i] = codes + (size_t)min(n0 + i * SG, rows - 1) * (ROW_BYTES / 32);  // past the last row, that one again
        UNROLL
        for (int j = 0; j < M_BLOCKS; j++) sums[i][j] = (int8)(0);
    }
    UNROLL
    for (int j = 0; j < M_BLOCKS; j++) from[j] = tiles + ((size_t)(m0 / 8 + j) * BLOCK_K) * STEP_BYTES;
    for (int k = 0; k < ROW_BYTES / 32; k++) {
        uint8 code[N_BLOCKS];
        UNROLL
        for (int i = 0; i < N_BLOCKS; i++) code[i] = row[i][k];
        for (int shift = 6; shift >= 0; shift -= 2) {
            int8 c[N_BLOCKS];
            UNROLL
            for (int i = 0; i < N_BLOCKS; i++) c[i] = as_int8(code[i] >> (uint8)(shift) & (uint8)(0x03030303u));
            UNROLL
            for (int j = 0; j < M_BLOCKS; j++) {
                PART part = LOAD_PART(from[j] + (k * 4 + 3 - shift / 2) * STEP_BYTES);
                UNROLL
                for (int i = 0; i < N_BLOCKS; i++) sums[i][j] = MULTIPLY(part, c[i], sums[i][j]);
            }
        }
    }
    UNROLL
    for (int j = 0; j < M_BLOCKS; j++) {
        UNROLL
        for (int i = 0; i < N_BLOCKS; i++) {
            int n = n0 + i * SG;
            if (n >= rows) continue;
            float w = w_scale[n];
            int each[8];
            vstore8(sums[i][j], 0, each);
            UNROLL
            for (int t = 0; t < 8; t++) {
                int m = m0 + j * 8 + t;
                if (m >= tokens) continue;
                float value = (float)(each[t] - x_sums[m]) * (scale[m] * w);
#if ADD
                out[(size_t)m * rows + n] += value;
#else
                out[(size_t)m * rows + n] = value;
#endif
            }
        }
    }
}
