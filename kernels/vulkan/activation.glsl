// The activation between gate and up.
layout(constant_id = 2) const int RELU2 = 0;
vec4 act(vec4 gate) {
    vec4 positive = max(gate, 0.0);
    return RELU2 != 0 ? positive * positive : gate / (1.0 + exp(-gate));
}
