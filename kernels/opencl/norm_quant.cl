// RMSNorm (where NORM), then absmax int8. One work-group a token; the row is read again from cache for each pass.
#if NORM
#define NORMED(i) (row[i] * inverse * weight[i])
#else
#define NORMED(i) (row[i])
#endif

kernel void norm_quant(global const int *step, global const float *x, global const float *weight, float eps,
                       global char *out, global float *scale, int dim) {
    local float scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float *row = x + (size_t)m * dim;
#if NORM
    float squares = 0.0f;
    for (int i = lane; i < dim; i += WG) squares += row[i] * row[i];
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);
#endif
    float largest = 0.0f;
    for (int i = lane; i < dim; i += WG) largest = fmax(largest, fabs(NORMED(i)));
    largest = fmax(group_max(largest, scratch), QUANT_FLOOR);
    float factor = 127.0f / largest;
    for (int i = lane; i < dim; i += WG) out[(size_t)m * dim + i] = convert_char_sat_rte(NORMED(i) * factor);
    if (lane == 0) scale[m] = largest / 127.0f;
}
