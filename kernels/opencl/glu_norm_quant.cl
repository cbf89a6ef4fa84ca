// act(gate) * up, RMSNorm (where NORM), absmax int8. One work-group a token; `products` keeps act(gate) * up between the passes.
// `sums` as in norm_quant.
#if NORM
#define GAINED(v, k) ((v) * weight[k])
#else
#define GAINED(v, k) (v)
#endif

kernel void glu_norm_quant(global const int *step, global const float *gate_up, global const float4 *weight, float eps,
                           global char *out, global float *scale, global int *sums, int dim, global float *products) {
    local float2 scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float4 *gate = (global const float4 *)(gate_up + (size_t)m * 2 * dim), *up = gate + dim / 4;
    global float4 *product = (global float4 *)(products + (size_t)m * dim);
    float2 found = (float2)(0.0f, 0.0f);
    for (int k = lane; k < dim / 4; k += WG) {
        float4 g = gate[k];
        float4 v = (float4)(act(g.x), act(g.y), act(g.z), act(g.w)) * up[k];
        product[k] = v;  // read again only by this work-item
        found = (float2)(found.x + dot(v, v), fmax(found.y, magnitude(GAINED(v, k))));
    }
    found = group_sum_max(found, scratch);
    float inverse = NORM ? 1.0f / sqrt(found.x / dim + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    int sum = 0;
    for (int k = lane; k < dim / 4; k += WG) {
        uint word = as_uint(convert_char4_sat_rte(GAINED(product[k], k) * factor));
        ((global uint *)(out + (size_t)m * dim))[k] = word;
        sum = dot4(0x01010101u, word, sum);
    }
    float total = group_sum((float)sum, scratch);  // exact: below 2^24, as are its parts
    if (lane == 0) {
        scale[m] = largest / 127.0f;
        sums[m] = (int)total;
    }
}
