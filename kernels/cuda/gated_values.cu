// RMSNorm of each head (if NORM), times an activated gate, in f32, as norm_values; UNTILE puts heads into the other order. One block
// a head of a token.
#include "gate.cuh"

extern "C" __global__ void gated_values(const int *step, const float *x, const float *gate, const float *weight, float eps,
                                        float *out, int width) {
    int head = blockIdx.x, m = blockIdx.y;
    start_dependents();
    wait_for_before();
    if (m >= STEP_TOKENS(step)) return;
    size_t row = (size_t)m * width;
    float inverse = NORM ? inverse_rms((const float4 *)(x + row + head * HEAD), HEAD, eps) : 1.0f;
    for (int i = threadIdx.x; i < HEAD; i += blockDim.x) {
        float y = x[row + head * HEAD + i] * inverse;
        if (NORM) y *= weight[i];
        out[row + place_of(head, width / HEAD) * HEAD + i] = y * activated(gate[row + head * HEAD + i]);
    }
}
