// act(gate) * up, RMSNorm (where NORM), absmax int8. One threadgroup a token; `products` keeps act(gate) * up between the passes.
// `sums` as in norm_quant.
#if NORM
#define GAINED(v, k) ((v) * weight[k])
#else
#define GAINED(v, k) (v)
#endif

[[kernel, max_total_threads_per_threadgroup(WG)]] void glu_norm_quant(
    device const int *step [[buffer(0)]], device const float *gate_up [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device char *out [[buffer(4)]], device float *scale [[buffer(5)]],
    device int *sums [[buffer(6)]], constant int &dim [[buffer(7)]], device float *products [[buffer(8)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device const float4 *gate = (device const float4 *)(gate_up + ulong(m) * 2 * ulong(dim)), *up = gate + dim / 4;
    device float4 *product = (device float4 *)(products + ulong(m) * ulong(dim));
    float2 found = float2(0.0f, 0.0f);
    for (int k = place.item; k < dim / 4; k += WG) {
        float4 g = gate[k];
        float4 v = float4(act(g.x), act(g.y), act(g.z), act(g.w)) * up[k];
        product[k] = v;  // read again only by this thread
        found = float2(found.x + dot(v, v), fmax(found.y, magnitude(GAINED(v, k))));
    }
    found = group_sum_max(found, scratch, place);
    float inverse = NORM ? 1.0f / precise::sqrt(found.x / float(dim) + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    int sum = 0;
    for (int k = place.item; k < dim / 4; k += WG) {
        char4 word = to_int8(GAINED(product[k], k) * factor);
        ((device char4 *)(out + ulong(m) * ulong(dim)))[k] = word;
        sum += sum4(word);
    }
    float total = group_sum(float(sum), scratch, place);  // exact: below 2^24, as are its parts
    if (place.item == 0) {
        scale[m] = largest / 127.0f;
        sums[m] = int(total);
    }
}
