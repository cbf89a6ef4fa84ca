// Decays and strengths of the delta rule. One work-group a head of a token.
#include "delta_gates.clh"

kernel void delta_gates(global const int *step, global const float4 *x, global const float4 *weight, float eps,
                        global const float4 *alpha, global const float4 *beta, global const float *bias, global const float *rate,
                        global float *out, int dim, int heads) {
    local float2 scratch[WG];
    int m = get_group_id(1), there = m < STEP_TOKENS(step);
    put_gates(get_group_id(0), there, x + (size_t)m * (dim / 4), weight, eps, alpha, beta, bias, rate, out + (size_t)m * 2 * heads, dim,
              heads, scratch);
}
