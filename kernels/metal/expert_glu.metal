// act(gate) * up of a token's experts, whose rows stand side by side, with gates and values limited, RMSNorm (where NORM),
// then absmax int8 of each row.
// Grid: [experts of a token, tokens]. Limits let NaN through.
inline float value_of(float gate, float up, float limit) {
    return act(gate > limit ? limit : gate) * (up > limit ? limit : up < -limit ? -limit : up);
}

inline float4 values_of(float4 g, float4 u, float limit) {
    return float4(value_of(g.x, u.x, limit), value_of(g.y, u.y, limit), value_of(g.z, u.z, limit), value_of(g.w, u.w, limit));
}

#if NORM
#define GAINED(v, k) ((v) * weight[k])
#else
#define GAINED(v, k) (v)
#endif

[[kernel, max_total_threads_per_threadgroup(WG)]] void expert_glu(
    device const int *step [[buffer(0)]], device const float4 *gate_up [[buffer(1)]], device const float4 *weight [[buffer(2)]],
    constant float &eps [[buffer(3)]], device char4 *out [[buffer(4)]], device float *scale [[buffer(5)]],
    constant int &dim [[buffer(6)]], constant float &limit [[buffer(7)]], PLACE) {
    threadgroup float2 scratch[SIMDGROUPS];
    Place place = PLACED;
    int quads = dim / 4;
    if (int(group.y) >= STEP_TOKENS(step)) return;
    ulong row = ulong(group.y) * ulong(groups.x) + ulong(group.x);
    device const float4 *gate = gate_up + row * 2 * ulong(quads), *up = gate + quads;
    float2 found = float2(0.0f, 0.0f);
    for (int k = place.item; k < quads; k += WG) {
        float4 v = values_of(gate[k], up[k], limit);
        found = float2(found.x + dot(v, v), fmax(found.y, magnitude(GAINED(v, k))));
    }
    found = group_sum_max(found, scratch, place);
    float inverse = NORM ? 1.0f / precise::sqrt(found.x / float(dim) + eps) : 1.0f;
    float largest = fmax(found.y * inverse, QUANT_FLOOR), factor = 127.0f / largest * inverse;
    for (int k = place.item; k < quads; k += WG)
        out[row * ulong(quads) + ulong(k)] = to_int8(GAINED(values_of(gate[k], up[k], limit), k) * factor);
    if (place.item == 0) scale[row] = largest / 127.0f;
}
