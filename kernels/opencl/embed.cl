// out[m] = table[tokens[m]]. One work-group a token.
kernel void embed(global const int *step, int tokens, global const WEIGHT *table, global float *out, int dim) {
    int m = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    size_t row = (size_t)step[tokens + m] * dim;
    for (int i = get_local_id(0); i < dim; i += get_local_size(0)) out[(size_t)m * dim + i] = LOAD_WEIGHT(table, row + i);
}
