/* Ternary micro-kernels for NEON with dot products. `sdot` by lane adds four products to each lane, its activations taken
 * from any of the four lanes of a register, so that nothing is broadcast. */
#include <arm_neon.h>

#define TILE_ROWS 4
#define GROUP_COLUMNS 16
#define BASE 4
#define PANEL_TILES 4
#define GEMM_TILES 4
#define MAX_TILES 4
#define BLOCK_TOKENS 4

/* The planes 0 and 3 (shifted down) count as they are; 1 and 2 weigh 4 and 16 and are summed apart. */
INLINE void gemv_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const uint8x16_t low = vdupq_n_u8(3), middle = vdupq_n_u8(12), high = vdupq_n_u8(48);
    int32x4_t one[PANEL_TILES], four[PANEL_TILES], sixteen[PANEL_TILES];
    for (int t = 0; t < tiles; t++) one[t] = four[t] = sixteen[t] = vdupq_n_s32(0);
    for (int64_t g = 0; g < groups; g++, x += 16) {
        const int8x16_t y = vld1q_s8(x);
        __builtin_prefetch(w + 1024);
        for (int t = 0; t < tiles; t++, w += 16) {
            const uint8x16_t codes = vld1q_u8(w);
            one[t] = vdotq_laneq_s32(one[t], vreinterpretq_s8_u8(vandq_u8(codes, low)), y, 0);
            four[t] = vdotq_laneq_s32(four[t], vreinterpretq_s8_u8(vandq_u8(codes, middle)), y, 1);
            sixteen[t] = vdotq_laneq_s32(sixteen[t], vreinterpretq_s8_u8(vandq_u8(codes, high)), y, 2);
            one[t] = vdotq_laneq_s32(one[t], vreinterpretq_s8_u8(vshrq_n_u8(codes, 6)), y, 3);
        }
    }
    for (int t = 0; t < tiles; t++)
        vst1q_s32(acc + 4 * t, vaddq_s32(one[t], vaddq_s32(vshrq_n_s32(four[t], 2), vshrq_n_s32(sixteen[t], 4))));
}

#define ONE_BIT
/* acc[4 tiles] = Σ bit · x over a panel in one bit, for one token. The bits 0 to 3, and 4 to 7 shifted down by four, weigh 1, 2,
 * 4 and 8: the sums of these are apart. */
INLINE void bit_tiles(const uint8_t *w, const int tiles, int64_t groups, const int8_t *x, int32_t *acc) {
    const uint8x16_t mask[4] = {vdupq_n_u8(1), vdupq_n_u8(2), vdupq_n_u8(4), vdupq_n_u8(8)};
    int32x4_t sum[PANEL_TILES][4];
    for (int t = 0; t < tiles; t++)
        for (int p = 0; p < 4; p++) sum[t][p] = vdupq_n_s32(0);
    for (int64_t g = 0; g < groups; g++, x += 32) {
        const int8x16_t y = vld1q_s8(x), z = vld1q_s8(x + 16);
        __builtin_prefetch(w + 1024);
        for (int t = 0; t < tiles; t++, w += 16) {
            const uint8x16_t low = vld1q_u8(w), high = vshrq_n_u8(low, 4);
#define ADD_BIT(p) \
    sum[t][p] = vdotq_laneq_s32(sum[t][p], vreinterpretq_s8_u8(vandq_u8(low, mask[p])), y, p); \
    sum[t][p] = vdotq_laneq_s32(sum[t][p], vreinterpretq_s8_u8(vandq_u8(high, mask[p])), z, p);
            ADD_BIT(0) ADD_BIT(1) ADD_BIT(2) ADD_BIT(3)
#undef ADD_BIT
        }
    }
    for (int t = 0; t < tiles; t++) {
        const int32x4_t ends = vaddq_s32(sum[t][0], vshrq_n_s32(sum[t][1], 1));
        vst1q_s32(acc + 4 * t, vaddq_s32(ends, vaddq_s32(vshrq_n_s32(sum[t][2], 2), vshrq_n_s32(sum[t][3], 3))));
    }
}

/* A register of x holds four activations of each of four tokens: the lane picks the token. */
INLINE void plane_tiles(
    const uint8_t *w, int64_t pitch, const int tiles, int64_t groups, const int32_t *x, const int tokens, int32_t *acc,
    const int acc_pitch, const int bits) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)((1 << bits) - 1));
    int32x4_t sum[MAX_TILES][BLOCK_TOKENS];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) sum[t][m] = vdupq_n_s32(0);
    for (int64_t g = 0; g < groups; g++, w += pitch) {
        uint8x16_t codes[MAX_TILES];
        for (int t = 0; t < tiles; t++) codes[t] = vld1q_u8(w + 16 * t);
        for (int p = 0; p < 8 / bits; p++, x += tokens) {
            int32x4_t four = vdupq_n_s32(0);
            memcpy(&four, x, (size_t)tokens * sizeof *x);
            const int8x16_t y = vreinterpretq_s8_s32(four);
            for (int t = 0; t < tiles; t++) {
                const int8x16_t plane = vreinterpretq_s8_u8(vandq_u8(codes[t], mask));
                codes[t] = bits == 1 ? vshrq_n_u8(codes[t], 1) : bits == 2 ? vshrq_n_u8(codes[t], 2) : vshrq_n_u8(codes[t], 4);
                sum[t][0] = vdotq_laneq_s32(sum[t][0], plane, y, 0);
                if (tokens > 1) sum[t][1] = vdotq_laneq_s32(sum[t][1], plane, y, 1);
                if (tokens > 2) sum[t][2] = vdotq_laneq_s32(sum[t][2], plane, y, 2);
                if (tokens > 3) sum[t][3] = vdotq_laneq_s32(sum[t][3], plane, y, 3);
            }
        }
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < tokens; m++) vst1q_s32(acc + m * acc_pitch + 4 * t, sum[t][m]);
}

/* Peak arithmetic throughput, for probe.h. */
#define PEAK_PATHS 16
#define PEAK_PRODUCTS 16
#define PEAK_REGISTER "+w"
typedef int32x4_t peak_t;
INLINE peak_t peak_step(peak_t sum) { return vdotq_laneq_s32(sum, vdupq_n_s8(2), vdupq_n_s8(3), 0); }
