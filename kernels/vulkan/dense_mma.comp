// requires: COOPMAT SUBGROUPS
// dense_matmul of f16 weights for several rows of x, on f16 cooperative matrices of 16 x 16 x 16 with f32 sums. x comes from
// split_rows. A work-group of eight subgroups of 32 takes 16 SM rows of x and 128 of the weight, 64 columns at a time; the next
// columns' loads are in flight while these are multiplied. Each chunk's sums are added to the total separately: matrix units may cut
// off what does not fit a sum, and less of a smaller one. Places and strides are in 16 bytes.
layout(constant_id = 1) const int COLS = 16;  // a multiple of 16
layout(constant_id = 2) const int SM = 1;     // at most 4
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, uvec4, split);
BUFFER(2, readonly, float, undo);
BUFFER(3, readonly, uvec4, weight);
BUFFER(4, writeonly, float, result);
layout(push_constant) uniform Push { int rows, first_row, all_rows; };
#define SUMS coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>
#define TOTAL(a, b) ((a) + (b))
#define LEFT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>
#define RIGHT coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB>
const int QUADS = COLS / 8, PITCH = 9;  // 8 and one more, so that rows fall into different banks
const int WEIGHTS = 32 * SM * PITCH;    // 16 SM rows of x, in two parts each, stand before the weights
shared uvec4 pool[WEIGHTS + 128 * PITCH];

KERNEL(dense_mma) {
    uint lane = LANE, n0 = gl_WorkGroupID.x * 128, r0 = gl_WorkGroupID.y * (16 * SM), count = STEP_ROWS;
    if (r0 >= count) return;
    SUMS totals[4];
#define CLEAR_TOTAL(m) if (m < SM) totals[m] = SUMS(0.0);
    REPEAT_4(CLEAR_TOTAL)
    uvec4 next_x[4], next_w[4];
    uint from = 0;
    // Rows of x: the high parts of all 16 SM, and behind them the low ones.
#define FETCH_X(i) if (i < SM) { \
        uint at = lane + i * 256, r = r0 + at / 8 % (16 * SM), k = from + at % 8; \
        next_x[i] = r < count && k < QUADS ? split[(2 * r + at / (128 * SM)) * QUADS + k] : uvec4(0); \
    }
#define FETCH_WEIGHTS(i) { \
        uint at = lane + i * 256, n = n0 + at / 8, k = from + at % 8; \
        next_w[i] = n < rows && k < QUADS ? weight[n * QUADS + k] : uvec4(0); \
    }
    REPEAT_4(FETCH_WEIGHTS)
    REPEAT_4(FETCH_X)
    while (from < QUADS) {
        barrier();
#define SHARE_X(i) if (i < SM) pool[(lane + i * 256) / 8 * PITCH + lane % 8] = next_x[i];
#define SHARE_WEIGHTS(i) pool[WEIGHTS + (lane + i * 256) / 8 * PITCH + lane % 8] = next_w[i];
        REPEAT_4(SHARE_X)
        REPEAT_4(SHARE_WEIGHTS)
        barrier();
        from += 8;
        if (from < QUADS) {
            REPEAT_4(FETCH_WEIGHTS)
            REPEAT_4(FETCH_X)
        }
        SUMS sums[4];
#define CLEAR(m) if (m < SM) sums[m] = SUMS(0.0);
        REPEAT_4(CLEAR)
        [[unroll]] for (uint k = 0; k < 8; k += 2) {
            RIGHT part;
            LEFT row;
            coopMatLoad(part, pool, WEIGHTS + gl_SubgroupID * 16 * PITCH + k, PITCH, gl_CooperativeMatrixLayoutColumnMajor);
#define MULTIPLY(m) if (m < SM) { \
        coopMatLoad(row, pool, m * 16 * PITCH + k, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        sums[m] = coopMatMulAdd(row, part, sums[m]); \
        coopMatLoad(row, pool, (SM + m) * 16 * PITCH + k, PITCH, gl_CooperativeMatrixLayoutRowMajor); \
        sums[m] = coopMatMulAdd(row, part, sums[m]); \
    }
            REPEAT_4(MULTIPLY)
        }
#define ADD(m) if (m < SM) totals[m] = TOTAL(totals[m], sums[m]);
        REPEAT_4(ADD)
    }
#define STORE(m) if (m < SM) { \
        barrier(); \
        coopMatStore(totals[m], pool, gl_SubgroupID * 4, 32, gl_CooperativeMatrixLayoutRowMajor); \
        barrier(); \
        for (uint i = lane; i < 16 * 128; i += 256) { \
            uint r = r0 + m * 16 + i / 128, n = n0 + i % 128; \
            if (r < count && n < rows) \
                result[r * all_rows + first_row + n] = uintBitsToFloat(pool[i / 4][i % 4]) * undo[r]; \
        } \
    }
    REPEAT_4(STORE)
}
