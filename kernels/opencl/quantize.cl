// Absmean ternary quantisation in three launches: partial sums, the scale, the codes.
kernel void absmean_partial(global const float *x, int n, global float *partial) {
    local float2 scratch[WG];
    float sum = 0.0f;
    for (int i = get_global_id(0); i < n; i += get_global_size(0)) sum += fabs(x[i]);
    sum = group_sum(sum, scratch);
    if (get_local_id(0) == 0) partial[get_group_id(0)] = sum;
}

kernel void absmean_scale(global const float *partial, int partials, int n, global float *scale) {
    local float2 scratch[WG];
    float sum = 0.0f;
    for (int i = get_local_id(0); i < partials; i += WG) sum += partial[i];
    sum = group_sum(sum, scratch);
    if (get_local_id(0) == 0) scale[0] = fmax(sum / n, 1e-5f);
}

kernel void ternary_codes(global const float *x, int n, global const float *scale, global char *codes) {
    for (int i = get_global_id(0); i < n; i += get_global_size(0))
        codes[i] = (char)clamp(rint(x[i] / scale[0]), -1.0f, 1.0f);
}
