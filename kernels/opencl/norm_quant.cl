// RMSNorm (where NORM), then absmax int8. One work-group a token; the row is read again from cache for the second pass. `sums` is
// the sum of each row of `out`, which a product with codes w + 1 subtracts. The norm is one factor of the whole row, so that the
// mean square and the greatest magnitude can be found together.
#if NORM
#define GAINED(k) (row[k] * weight[k])
#else
#define GAINED(k) (row[k])
#endif

kernel void norm_quant(global const int *step, global const float *x, global const float4 *weight, float eps, global char *out,
                       global float *scale, global int *sums, int dim) {
    local float2 scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float4 *row = (global const float4 *)(x + (size_t)m * dim);
    float2 found = (float2)(0.0f, 0.0f);
    for (int k = lane; k < dim / 4; k += WG) found = (float2)(found.x + dot(row[k], row[k]), fmax(found.y, magnitude(GAINED(k))));
    found = group_sum_max(found, scratch);
    float inverse = NORM ? 1.0f / sqrt(found.x / dim + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    int sum = 0;
    for (int k = lane; k < dim / 4; k += WG) {
        uint word = as_uint(convert_char4_sat_rte(GAINED(k) * factor));
        ((global uint *)(out + (size_t)m * dim))[k] = word;
        sum = dot4(0x01010101u, word, sum);
    }
    float total = group_sum((float)sum, scratch);  // exact: below 2^24, as are its parts
    if (lane == 0) {
        scale[m] = largest / 127.0f;
        sums[m] = (int)total;
    }
}
