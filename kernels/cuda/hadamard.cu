// The Walsh-Hadamard transform of rows of `width` floats, in place, with signs before (SIGNS 1) or after it (2). A block of threads
// has BLOCK elements, in shared memory where there is room for them. ROWS: the rows that need logits, else those of all tokens.
#define HELD (BLOCK <= 4096)

extern "C" __global__ void __launch_bounds__(WG) hadamard(const int *step, const float *signs, float *data, int width) {
#if HELD
    __shared__ float held[BLOCK];
#endif
    start_dependents();
    wait_for_before();
    if ((int)blockIdx.y >= (ROWS ? STEP_ROWS(step) : STEP_TOKENS(step))) return;
    float *row = data + (size_t)blockIdx.y * width + blockIdx.x * BLOCK;
    const float *sign = signs + blockIdx.x * BLOCK;
#if HELD
    float *at = held;
#else
    float *at = row;
#endif
    const float unit = 1.0f / sqrtf((float)BLOCK);
    for (int i = threadIdx.x; i < BLOCK; i += WG) at[i] = row[i] * (SIGNS == 1 ? sign[i] * unit : unit);
    for (int half = 1; half < BLOCK; half *= 2) {
        __syncthreads();
        for (int i = threadIdx.x; i < BLOCK / 2; i += WG) {
            int low = i / half * 2 * half + i % half;
            float a = at[low], b = at[low + half];
            at[low] = a + b, at[low + half] = a - b;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BLOCK; i += WG) row[i] = SIGNS == 2 ? at[i] * sign[i] : at[i];
}
