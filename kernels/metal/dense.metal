// Summation of the products of f32 rows with the head: the same sum, to the bit, in dense_matmul and head_choose, so that equal
// logits stay equal. Thread `lane` of a simdgroup takes every 32nd four columns, in their order.
inline float add_products(float sum, float4 w, float4 v) {
    sum = fma(w.x, v.x, sum);
    sum = fma(w.y, v.y, sum);
    sum = fma(w.z, v.z, sum);
    return fma(w.w, v.w, sum);
}

inline float sum_of_lanes(float sum) {
    for (ushort apart = 16; apart > 0; apart /= 2) sum += simd_shuffle_xor(sum, apart);
    return sum;
}
