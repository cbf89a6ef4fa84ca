// out[m] = table[tokens[m]]. One block per token.
extern "C" __global__ void embed(const int *step, int tokens, const weight_t *table, float *out, int dim) {
    int m = blockIdx.x;
    start_dependents();
    if (m >= STEP_TOKENS(step)) return;
    const weight_t *row = table + (size_t)step[tokens + m] * dim;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(size_t)m * dim + i] = to_float(row[i]);
}
