// Puts the rows of a product into columns of a wider matrix, from `first` on, or adds them (where ADD). One work-group a token.
kernel void put_columns(global const int *step, global const float *product, global float *out, int cols, int width, int first) {
    int m = get_group_id(0);
    if (m >= STEP_TOKENS(step)) return;
    for (int i = get_local_id(0); i < cols; i += WG) {
        size_t to = (size_t)m * width + first + i;
        float value = product[(size_t)m * cols + i];
        out[to] = ADD ? out[to] + value : value;
    }
}
