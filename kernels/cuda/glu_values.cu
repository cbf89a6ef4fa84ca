// act(gate) * up, in f32, as norm_values. One block a token.
extern "C" __global__ void glu_values(const int *step, const float *gate_up, float *out, int dim) {
    int m = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    const float *gate = gate_up + (size_t)m * 2 * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(size_t)m * dim + i] = act(gate[i]) * gate[dim + i];
}
