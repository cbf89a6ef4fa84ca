// act(gate) * up, RMSNorm (where NORM), absmax int8. One work-group a token; the products are kept in `scratch`, the gate's place.
#if RELU2
#define ACT(g) (fmax((g), 0.0f) * fmax((g), 0.0f))
#else
#define ACT(g) ((g) / (1.0f + exp(-(g))))
#endif
#if NORM
#define NORMED(i) (product[i] * inverse * weight[i])
#else
#define NORMED(i) (product[i])
#endif

kernel void glu_norm_quant(global const int *step, global float *gate_up, global const float *weight, float eps,
                           global char *out, global float *scale, int dim, global float *products) {
    local float scratch[WG];
    int m = get_group_id(0), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float *gate = gate_up + (size_t)m * 2 * dim, *up = gate + dim;
    global float *product = products + (size_t)m * dim;
    float squares = 0.0f, largest = 0.0f;
    for (int i = lane; i < dim; i += WG) {
        float value = ACT(gate[i]) * up[i];
        product[i] = value;  // read again only by this work-item
        squares += value * value;
    }
#if NORM
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);
#endif
    for (int i = lane; i < dim; i += WG) largest = fmax(largest, fabs(NORMED(i)));
    largest = fmax(group_max(largest, scratch), QUANT_FLOOR);
    float factor = 127.0f / largest;
    for (int i = lane; i < dim; i += WG) out[(size_t)m * dim + i] = convert_char_sat_rte(NORMED(i) * factor);
    if (lane == 0) scale[m] = largest / 127.0f;
}
