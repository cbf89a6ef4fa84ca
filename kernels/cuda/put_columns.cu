// Puts the rows of a product into columns of a wider matrix, from `first` on, or adds them (where ADD). One block a token.
extern "C" __global__ void put_columns(const int *step, const float *product, float *out, int cols, int width, int first) {
    int m = blockIdx.x;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        float *to = out + (size_t)m * width + first + i, value = product[(size_t)m * cols + i];
        *to = ADD ? __fadd_rn(*to, value) : value;
    }
}
