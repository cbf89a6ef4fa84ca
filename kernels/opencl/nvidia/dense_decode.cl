// dense_matmul of f16 weights for one row of x: a warp has a weight row at a time, 16 bytes a work-item and load, and keeps x in
// registers, so that nothing but weights moves. Warps go through the weight rows by turns.
#include "nvidia/warps.clh"

#define ITERS (COLS / 8 / WARP) /* COLS is a multiple of 256 */

kernel __attribute__((reqd_work_group_size(WARP *WARPS, 1, 1))) OF_WARPS void dense_decode(
    global const int *step, global const float4 *x, global const uint4 *weight, global float *out, int rows) {
    int lane = get_local_id(0) % WARP;
    if (STEP_ROWS(step) < 1) return;
    float4 low[ITERS], high[ITERS];
    UNROLL
    for (int i = 0; i < ITERS; i++) {
        low[i] = x[(i * WARP + lane) * 2];
        high[i] = x[(i * WARP + lane) * 2 + 1];
    }
    for (int n = get_group_id(0) * WARPS + get_local_id(0) / WARP; n < rows; n += get_num_groups(0) * WARPS) {
        uint4 w[ITERS];
        UNROLL
        for (int i = 0; i < ITERS; i++) w[i] = stream(weight + (size_t)n * (COLS / 8) + i * WARP + lane);
        float sum = 0.0f;
        UNROLL
        for (int i = 0; i < ITERS; i++) {
            sum += dot((float4)(half_of(w[i].x), half_of(w[i].x >> 16), half_of(w[i].y), half_of(w[i].y >> 16)), low[i]);
            sum += dot((float4)(half_of(w[i].z), half_of(w[i].z >> 16), half_of(w[i].w), half_of(w[i].w >> 16)), high[i]);
        }
        sum = warp_add(sum);
        if (lane == 0) out[n] = sum;
    }
}
