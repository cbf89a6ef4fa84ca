// Rows that a transform takes, as f32: act(gate) * up. One work-group a token.
kernel void glu_values(global const int *step, global const float *gate_up, global float *out, int dim) {
    int m = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    global const float *gate = gate_up + (size_t)m * 2 * dim;
    for (int i = get_local_id(0); i < dim; i += WG) out[(size_t)m * dim + i] = act(gate[i]) * gate[dim + i];
}
