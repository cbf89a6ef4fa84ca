// act(gate) * up, RMSNorm (if NORM), absmax int8. One block per token, which holds the row in registers. `sums` as in
// norm_quant.
#define VECTORS VECTORS_OF(DIM, WG)

extern "C" __global__ void glu_norm_quant(const int *step, const float *gate_up, const float *weight, float eps,
                                          signed char *out, float *scale, int *sums) {
    int m = blockIdx.x;
    start_dependents();
    float4 v[VECTORS], gain[VECTORS];
#if NORM
#pragma unroll
    for (int i = 0; i < VECTORS; i++) gain[i] = vector_or_zero(weight, threadIdx.x + i * WG, DIM);
#endif
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    const float *gate = gate_up + (size_t)m * 2 * DIM, *up = gate + DIM;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int k = threadIdx.x + i * WG;
        float4 g = vector_or_zero(gate, k, DIM), u = vector_or_zero(up, k, DIM);
        v[i] = make_float4(act(g.x) * u.x, act(g.y) * u.y, act(g.z) * u.z, act(g.w) * u.w);
    }
    int sum = 0;
    float s = norm_quant_row<WG / WARP, NORM>(v, gain, DIM, eps, [&](int k, int word) {
        if (k < DIM / 4) ((int *)(out + (size_t)m * DIM))[k] = word;
        sum = add_to_row(word, sum);
    });
    finish_row<WG / WARP>(sum, s, sums + m, scale + m);
}
