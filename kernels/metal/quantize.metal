// Absmean ternary quantisation in three launches: partial sums, the scale, the codes.
[[kernel, max_total_threads_per_threadgroup(WG)]] void absmean_partial(
    device const float *x [[buffer(0)]], constant int &n [[buffer(1)]], device float *partial [[buffer(2)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    float sum = 0.0f;
    for (int i = int(group.x) * WG + place.item; i < n; i += int(groups.x) * WG) sum += fabs(x[i]);
    sum = group_sum(sum, scratch, place);
    if (place.item == 0) partial[group.x] = sum;
}

[[kernel, max_total_threads_per_threadgroup(WG)]] void absmean_scale(
    device const float *partial [[buffer(0)]], constant int &partials [[buffer(1)]], constant int &n [[buffer(2)]],
    device float *scale [[buffer(3)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    float sum = 0.0f;
    for (int i = place.item; i < partials; i += WG) sum += partial[i];
    sum = group_sum(sum, scratch, place);
    if (place.item == 0) scale[0] = fmax(sum / float(n), 1e-5f);
}

[[kernel, max_total_threads_per_threadgroup(WG)]] void ternary_codes(
    device const float *x [[buffer(0)]], constant int &n [[buffer(1)]], device const float *scale [[buffer(2)]],
    device char *codes [[buffer(3)]], PLACE) {
    for (int i = int(group.x) * WG + int(index); i < n; i += int(groups.x) * WG)
        codes[i] = char(clamp(rint(x[i] / scale[0]), -1.0f, 1.0f));
}
