// variants: SUBGROUPS
// Absmean ternary quantisation in three launches: partial sums, the scale, the codes (four to a word).
BUFFER(0, readonly, float, source);
#if ENTRY_ternary_codes
BUFFER(1, readonly, float, scale);
BUFFER(2, writeonly, uint, codes);
layout(push_constant) uniform Push { int n; };
#else
BUFFER(1, writeonly, float, target);
#if ENTRY_absmean_scale
layout(push_constant) uniform Push { int count, n; };
#else
layout(push_constant) uniform Push { int n; };
#endif
#endif

#if ENTRY_absmean_partial
KERNEL(absmean_partial) {
    float sum = 0.0;
    for (uint i = gl_WorkGroupID.x * WG + LANE; i < n; i += gl_NumWorkGroups.x * WG) sum += abs(source[i]);
    sum = group_sum_max(sum, 0.0).x;
    if (LANE == 0) target[gl_WorkGroupID.x] = sum;
}
#elif ENTRY_absmean_scale
KERNEL(absmean_scale) {
    float sum = 0.0;
    for (int i = LANE; i < count; i += WG) sum += source[i];
    sum = group_sum_max(sum, 0.0).x;
    if (LANE == 0) target[0] = max(sum / float(n), 1e-5);
}
#else
KERNEL(ternary_codes) {
    for (uint i = gl_WorkGroupID.x * WG + LANE; 4 * i < n; i += gl_NumWorkGroups.x * WG) {
        uint word = 0;
        for (uint j = 0; j < 4 && 4 * i + j < n; j++)
            word |= uint(int(clamp(roundEven(source[4 * i + j] / scale[0]), -1.0, 1.0)) & 0xFF) << (8 * j);
        codes[i] = word;
    }
}
#endif
