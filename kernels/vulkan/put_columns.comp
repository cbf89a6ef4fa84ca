// Puts the rows of a product into columns of a wider matrix, from `first` on, or adds them (where ADD). One work-group a token.
layout(constant_id = 1) const int ADD = 0;
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, float, product);
BUFFER(2, , float, result);
layout(push_constant) uniform Push { int cols, width, first; };

KERNEL(put_columns) {
    uint m = gl_WorkGroupID.x;
    if (m >= STEP_TOKENS) return;
    for (uint i = LANE; i < cols; i += WG) {
        uint to = m * uint(width) + first + i;
        float value = product[m * uint(cols) + i];
        result[to] = ADD != 0 ? result[to] + value : value;
    }
}
