// Decays and strengths of the delta rule, from the norm of a row and two small products. One work-group a head of a token. The norm is
// one factor of the whole row, so all three sums are found together.
kernel void delta_gates(global const int *step, global const float4 *x, global const float4 *weight, float eps,
                        global const float4 *alpha, global const float4 *beta, global const float *bias, global const float *rate,
                        global float *out, int dim, int heads) {
    local float2 scratch[WG];
    int h = get_group_id(0), m = get_group_id(1), lane = get_local_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float4 *row = x + (size_t)m * (dim / 4);
    float squares = 0.0f, decay = 0.0f, strength = 0.0f;
    for (int k = lane; k < dim / 4; k += WG) {
        float4 v = row[k], y = v * weight[k];
        squares += dot(v, v);
        decay += dot(y, alpha[(size_t)h * (dim / 4) + k]);
        strength += dot(y, beta[(size_t)h * (dim / 4) + k]);
    }
    float inverse = 1.0f / sqrt(group_sum(squares, scratch) / dim + eps);
    decay = group_sum(decay, scratch) * inverse + bias[h];
    strength = group_sum(strength, scratch) * inverse;
    if (lane == 0) {
        out[(size_t)m * 2 * heads + h] = rate[h] * (fmax(decay, 0.0f) + log(1.0f + exp(-fabs(decay))));
        out[(size_t)m * 2 * heads + heads + h] = sigmoid(strength);
    }
}
