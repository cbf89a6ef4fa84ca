// RMSNorm (where NORM), then absmax int8. One threadgroup a token; the row is read again from cache for the second pass. `sums` is
// the sum of each row of `out`, which a product with codes w + 1 subtracts. The norm is one factor of the whole row, so that the
// mean square and the greatest magnitude can be found together.
#if NORM
#define GAINED(k) (row[k] * weight[k])
#else
#define GAINED(k) (row[k])
#endif

[[kernel, max_total_threads_per_threadgroup(WG)]] void norm_quant(
    device const int *step [[buffer(0)]], device const float *x [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device char *out [[buffer(4)]], device float *scale [[buffer(5)]],
    device int *sums [[buffer(6)]], constant int &dim [[buffer(7)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int m = int(group.x);
    if (m >= STEP_TOKENS(step)) return;
    device const float4 *row = (device const float4 *)(x + ulong(m) * ulong(dim));
    float2 found = float2(0.0f, 0.0f);
    for (int k = place.item; k < dim / 4; k += WG) found = float2(found.x + dot(row[k], row[k]), fmax(found.y, magnitude(GAINED(k))));
    found = group_sum_max(found, scratch, place);
    float inverse = NORM ? 1.0f / precise::sqrt(found.x / float(dim) + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    int sum = 0;
    for (int k = place.item; k < dim / 4; k += WG) {
        char4 word = to_int8(GAINED(k) * factor);
        ((device char4 *)(out + ulong(m) * ulong(dim)))[k] = word;
        sum += sum4(word);
    }
    float total = group_sum(float(sum), scratch, place);  // exact: below 2^24, as are its parts
    if (place.item == 0) {
        scale[m] = largest / 127.0f;
        sums[m] = int(total);
    }
}
