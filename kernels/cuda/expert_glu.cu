// act(gate) * up of a token's experts, whose rows stand side by side, with gates and values limited, RMSNorm (where NORM), then absmax
// int8 of each row. Grid: [experts of a token, tokens]. A block holds its row in registers.
#include "limit.cuh"
#define VECTORS VECTORS_OF(DIM, WG)

extern "C" __global__ void __launch_bounds__(WG)
expert_glu(const int *step, const float *gate_up, const float *weight, float eps, float limit, signed char *out, float *scale) {
    size_t row = (size_t)blockIdx.y * gridDim.x + blockIdx.x;
    start_dependents();
    float4 v[VECTORS], gain[VECTORS];
#if NORM
#pragma unroll
    for (int i = 0; i < VECTORS; i++) gain[i] = vector_or_zero(weight, threadIdx.x + i * WG, DIM);
#endif
    wait_for_before();
    if (blockIdx.y >= STEP_TOKENS(step)) return;
    const float *gate = gate_up + row * 2 * DIM, *up = gate + DIM;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int k = threadIdx.x + i * WG;
        float4 g = vector_or_zero(gate, k, DIM), u = vector_or_zero(up, k, DIM);
        v[i] = make_float4(limited_product(g.x, u.x, limit), limited_product(g.y, u.y, limit), limited_product(g.z, u.z, limit),
                           limited_product(g.w, u.w, limit));
    }
    float s = norm_quant_row<WG / WARP, NORM>(v, gain, DIM, eps, [&](int k, int word) {
        if (k < DIM / 4) ((int *)(out + row * DIM))[k] = word;
    });
    if (threadIdx.x == 0) scale[row] = s;
}
