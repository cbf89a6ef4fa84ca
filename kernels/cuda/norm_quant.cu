// RMSNorm (if NORM), then absmax int8. One block per token, which holds the row in registers. `sums` is the sum of each
// row of `out`, which a product with codes w + 1 subtracts; or where BOUND, what ternary_group_tiles checks.
#define VECTORS VECTORS_OF(DIM, WG)

extern "C" __global__ void norm_quant(const int *step, const float *x, const float *weight, float eps, signed char *out,
                                      float *scale, int *sums) {
    int m = blockIdx.x;
    start_dependents();
    float4 v[VECTORS], gain[VECTORS];
#if NORM
#pragma unroll
    for (int i = 0; i < VECTORS; i++) gain[i] = vector_or_zero(weight, threadIdx.x + i * WG, DIM);
#endif
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
#pragma unroll
    for (int i = 0; i < VECTORS; i++) v[i] = vector_or_zero(x + (size_t)m * DIM, threadIdx.x + i * WG, DIM);
    int sum = 0;
    float s = norm_quant_row<WG / WARP, NORM>(v, gain, DIM, eps, [&](int k, int word) {
        if (k < DIM / 4) ((int *)(out + (size_t)m * DIM))[k] = word;
        sum = add_to_row(word, sum);
    });
    finish_row<WG / WARP>(sum, s, sums + m, scale + m);
}
