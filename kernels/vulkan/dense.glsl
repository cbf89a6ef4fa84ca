// Summation of the products of f32 rows with an f16 head without matrix units: the same sum, to the bit, in dense_decode,
// dense_matmul and head_choose, so that equal logits stay equal. Lane `part` of those that share a weight row takes every
// LANES-th eight columns, in their order.

vec4 halves(uint a, uint b) { return vec4(unpackHalf2x16(a), unpackHalf2x16(b)); }

float add_products(float sum, vec4 low, vec4 high, vec4 a, vec4 b) {
    sum += dot(low, a);
    sum += dot(high, b);
    return sum;
}

#if SUBGROUPS
float sum_of_lanes(float sum, uint lanes) {
    for (uint apart = lanes / 2; apart > 0; apart /= 2) sum += subgroupShuffleXor(sum, apart);
    return sum;
}
#endif
