// A row of activations quantised to int8 in shared memory, and its products with rows of codes, for ternary_decode and
// decode_layer. The products are of codes (w + 1); their offset adds the sum of the row, which is subtracted at the end. Declared before it:
// X_SPACE, and MORE(i) where an invocation may have more than 16 quads of the row.
vec4 v[16], gain[16];       // this invocation's quads of the row and of its norm's weight: those WG apart
uvec4 first[8], second[8];  // codes in flight, of one row of W and of a second one
shared uvec4 x_quads[X_SPACE];  // the operands of a chunk's four bit pairs are `pitch` apart
#if SUBGROUPS
shared int x_sums[SUBS];  // sums that each subgroup has stored
#else
shared int x_sum;
shared ivec2 partial[WG];
#endif

// Puts the i-th word of four activations in its place; returns their sum.
int put(uint i, uint word, uint chunks, uint pitch) {
    if (i < 16 * chunks) x_quads[i % 32 / 8 * pitch + i / 32 * 2 + i % 8 / 4][i % 4] = word;
    return dot4(0x01010101u, word, 0);
}

// Called before the row is stored, and before a barrier.
void begin_sum(uint lane) {
#if !SUBGROUPS
    if (lane == 0) x_sum = 0;
#endif
}

// Called after the row is stored, with the sum of this invocation's part.
void end_sum(int sum) {
#if SUBGROUPS
    sum = subgroupAdd(sum);
    if (gl_SubgroupInvocationID == 0) x_sums[gl_SubgroupID] = sum;
#else
    atomicAdd(x_sum, sum);
#endif
    barrier();
}

int sum_of_row() {
#if SUBGROUPS
    int sum = 0;
    [[unroll]] for (int i = 0; i < SUBS; i++) sum += x_sums[i];
    return sum;
#else
    return x_sum;
#endif
}

// Quantises a row of `quads` that is in `v`, after RMSNorm where `normed` (else `gain` is not looked at); returns the scale.
float quantise(uint lane, uint quads, uint chunks, uint pitch, bool normed, float eps) {
    begin_sum(lane);
    float squares = 0.0, largest = 0.0;
    uint held = (quads + WG - 1) / WG;
#define LOOK(i) if (i < held) { \
        squares += dot(v[i], v[i]); \
        if (normed) v[i] *= gain[i]; \
        largest = max(largest, max4(abs(v[i]))); \
    }
    REPEAT_16(LOOK)
#ifdef MORE
    for (uint i = lane + 16 * WG; i < quads; i += WG) {
        vec4 more = MORE(i);
        squares += dot(more, more);
        largest = max(largest, max4(abs(more * gain_of(i))));
    }
#endif
    vec2 found = group_sum_max(squares, largest);  // contains the barriers that begin_sum needs
    float inverse = normed ? 1.0 / sqrt(found.x / float(4 * quads) + eps) : 1.0;
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    int sum = 0;
#define PUT(i) if (i < held && lane + i * WG < quads) sum += put(lane + i * WG, quantised(v[i] * factor), chunks, pitch);
    REPEAT_16(PUT)
#ifdef MORE
    for (uint i = lane + 16 * WG; i < quads; i += WG) sum += put(i, quantised(MORE(i) * gain_of(i) * factor), chunks, pitch);
#endif
    for (uint i = quads + lane; i < 16 * chunks; i += WG) put(i, 0, chunks, pitch);
    end_sum(sum);
    return largest / 127.0;
}

// Sums of products of a row and of a second one. Codes of a bit pair stay in place in the word except for the highest, whose
// bytes would be negative there: weights of 1, 4 and 16 are summed apart.
struct Sums {
    ivec3 one, other;
};
const Sums NONE = Sums(ivec3(0), ivec3(0));

int product(uvec4 words, uint mask, uvec4 x, int sum) {
    sum = dot4(words.x & mask, x.x, sum);
    sum = dot4(words.y & mask, x.y, sum);
    sum = dot4(words.z & mask, x.z, sum);
    return dot4(words.w & mask, x.w, sum);
}

// Adds the products of 64 weights of one row, and of a second where `two`, to the sums.
Sums products(uvec4 one, uvec4 other, uint chunk, Sums sums, uint chunks, uint pitch, bool two) {
    if (chunk >= chunks) return sums;
#define PLANE(p, shift, mask, weight) { \
        uvec4 x = x_quads[p * pitch + chunk]; \
        sums.one.weight = product(one >> shift, mask, x, sums.one.weight); \
        if (two) sums.other.weight = product(other >> shift, mask, x, sums.other.weight); \
    }
    PLANE(0, 6, 0x03030303u, x) PLANE(1, 0, 0x30303030u, z) PLANE(2, 0, 0x0C0C0C0Cu, y) PLANE(3, 0, 0x03030303u, x)
    return sums;
}

// Sums over the lanes that share a row; without subgroups, only the first lane gets them.
ivec2 sums_of_lanes(Sums all, uint lane, uint lanes, bool two) {
    ivec2 sums = ivec2(all.one.x, all.other.x) + (ivec2(all.one.y, all.other.y) >> 2) + (ivec2(all.one.z, all.other.z) >> 4);
#if SUBGROUPS
    for (uint apart = lanes / 2; apart > 0; apart /= 2) {
        sums.x += subgroupShuffleXor(sums.x, apart);
        if (two) sums.y += subgroupShuffleXor(sums.y, apart);
    }
#else
    partial[lane] = sums;
    barrier();
    if (lane % lanes == 0)
        for (uint i = 1; i < lanes; i++) sums += partial[lane + i];
#endif
    return sums;
}

float act(float gate, bool relu2) {
    float positive = max(gate, 0.0);
    return relu2 ? positive * positive : gate / (1.0 + exp(-gate));
}

float scaled(int sum, float unit, float w_scale) {
    precise float factor = unit * w_scale;
    precise float value = float(sum - sum_of_row()) * factor;
    return value;
}

float plus(float a, float b) {
    precise float sum = a + b;
    return sum;
}
