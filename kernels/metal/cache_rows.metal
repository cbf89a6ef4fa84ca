// Writing rows to the cache: rotation, and the codes of an int8 cache.

#ifndef PAIRS
#define PAIRS (DIM / 2) /* of a head that are rotated; the elements after them stay */
#endif

// Both elements of pair i of a head, rotated.
inline float2 rotated_pair(device const float *head, device const float *cosines, device const float *sines, int position, int i) {
    ulong angle = ulong(position) * PAIRS + ulong(i);
    float c = cosines[angle], s = sines[angle], a = head[NEOX ? i : 2 * i], b = head[NEOX ? i + PAIRS : 2 * i + 1];
    return float2(a * c - b * s, b * c + a * s);
}

// Element i of a rotated head.
inline float rotated(device const float *head, device const float *cosines, device const float *sines, int position, int i) {
    if (i >= 2 * PAIRS) return head[i];
    int pair = NEOX ? i % PAIRS : i / 2;
    bool second = NEOX ? i >= PAIRS : i % 2 == 1;
    float2 both = rotated_pair(head, cosines, sines, position, pair);
    return second ? both.y : both.x;
}

#if KV_I8
#define MIN_ROW 1e-30f /* a row whose greatest magnitude is below it is kept as zeros */

// The magnitude of an element, infinite where it is NaN, which fmax would ignore.
inline float kv_magnitude(float v) { return (as_type<uint>(v) & 0x7fffffffu) < 0x7f800000u ? fabs(v) : INFINITY; }

// The scale of a row whose greatest magnitude is `greatest`, and the code of an element of it.
inline float kv_scale(float greatest) {
    return greatest < MIN_ROW ? 0.0f : greatest < INFINITY ? greatest / 127.0f : as_type<float>(0x7fc00000u);
}
inline char kv_code(float v, float greatest) {
    return greatest < MIN_ROW || greatest == INFINITY ? char(0) : char(rint(v * (127.0f / greatest)));
}
#endif
