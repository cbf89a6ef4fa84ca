// Absmean ternary quantisation in three launches: partial sums, the scale, the codes.
extern "C" __global__ void absmean_partial(const float *x, int n, float *partial) {
    float sum = 0.0f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += fabsf(x[i]);
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void absmean_scale(const float *partial, int partials, int n, float *scale) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < partials; i += blockDim.x) sum += partial[i];
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) scale[0] = fmaxf(sum / n, 1e-5f);
}

extern "C" __global__ void ternary_codes(const float *x, int n, const float *scale, signed char *codes) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        codes[i] = (signed char)fminf(fmaxf(rintf(x[i] / scale[0]), -1.0f), 1.0f);
}
