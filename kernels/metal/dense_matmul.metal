// out[r, n] = x[r] . weight[n], f32 sums. A simdgroup takes EACH weight rows, TOKENS rows of x share their read.
#include "dense.metal"

[[kernel, max_total_threads_per_threadgroup(WG)]] void dense_matmul(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device const WEIGHT *weight [[buffer(2)]],
    device float *out [[buffer(3)]], constant int &cols [[buffer(4)]], constant int &rows [[buffer(5)]], PLACE) {
    Place place = PLACED;
    int first_row = (int(group.x) * SIMDGROUPS + place.simdgroup) * EACH, first = int(group.y) * TOKENS, count = STEP_ROWS(step);
    if (first >= count) return;
    float sums[EACH][TOKENS];
    for (int e = 0; e < EACH; e++)
        for (int t = 0; t < TOKENS; t++) sums[e][t] = 0.0f;
    for (int k = place.lane; k < cols / 4; k += 32) {
        float4 w[EACH];
        for (int e = 0; e < EACH; e++)
            w[e] = float4(((device const WEIGHT4 *)(weight + ulong(min(first_row + e, rows - 1)) * ulong(cols)))[k]);
        for (int t = 0; t < TOKENS; t++) {
            float4 v = ((device const float4 *)(x + ulong(min(first + t, count - 1)) * ulong(cols)))[k];
            for (int e = 0; e < EACH; e++) sums[e][t] = add_products(sums[e][t], w[e], v);
        }
    }
    for (int e = 0; e < EACH; e++) {
        for (int t = 0; t < TOKENS; t++) {
            float sum = sum_of_lanes(sums[e][t]);
            int to_row = first_row + e, to = first + t;
            if (place.lane == 0 && to_row < rows && to < count) out[ulong(to) * ulong(rows) + ulong(to_row)] = sum;
        }
    }
}
