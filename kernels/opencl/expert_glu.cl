// act(gate) * up of a token's experts, whose rows stand side by side, with gates and values limited, RMSNorm (where NORM),
// then absmax int8 of each row.
// Grid: [experts of a token, tokens]. Limits let NaN through.
inline float value_of(float gate, float up, float limit) {
    return act(gate > limit ? limit : gate) * (up > limit ? limit : up < -limit ? -limit : up);
}

inline float4 values_of(float4 g, float4 u, float limit) {
    return (float4)(value_of(g.x, u.x, limit), value_of(g.y, u.y, limit), value_of(g.z, u.z, limit), value_of(g.w, u.w, limit));
}

#if NORM
#define GAINED(v, k) ((v) * weight[k])
#else
#define GAINED(v, k) (v)
#endif

kernel void expert_glu(global const int *step, global const float4 *gate_up, global const float4 *weight, float eps, global char4 *out,
                       global float *scale, int dim, float limit) {
    local float2 scratch[WG];
    int item = get_local_id(0), quads = dim / 4;
    if ((int)get_group_id(1) >= STEP_TOKENS(step)) return;
    size_t row = get_group_id(1) * get_num_groups(0) + get_group_id(0);
    global const float4 *gate = gate_up + row * 2 * quads, *up = gate + quads;
    float2 found = (float2)(0.0f, 0.0f);
    for (int k = item; k < quads; k += WG) {
        float4 v = values_of(gate[k], up[k], limit);
        found = (float2)(found.x + dot(v, v), fmax(found.y, magnitude(GAINED(v, k))));
    }
    found = group_sum_max(found, scratch);
    float inverse = NORM ? 1.0f / sqrt(found.x / dim + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    for (int k = item; k < quads; k += WG) out[row * quads + k] = convert_char4_sat_rte(GAINED(values_of(gate[k], up[k], limit), k) * factor);
    if (item == 0) scale[row] = largest / 127.0f;
}
