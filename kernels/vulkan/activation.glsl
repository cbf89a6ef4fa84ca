// The activation between gate and up.
layout(constant_id = 2) const int RELU2 = 0;
layout(constant_id = 3) const int GELU = 0;
vec4 act(vec4 gate) {
    vec4 positive = max(gate, 0.0);
    if (RELU2 != 0) return positive * positive;
    // (1 + tanh(z)) / 2 = sigmoid(2z); 2 sqrt(2 / pi)
    vec4 logit = GELU != 0 ? 1.5957691216 * gate * (1.0 + 0.044715 * gate * gate) : gate;
    return gate / (1.0 + exp(-logit));
}
