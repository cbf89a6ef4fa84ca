// variants: SUBGROUPS
// Quantisations with a Walsh-Hadamard transform, whole: norm_quant (KIND 0), glu_norm_quant (1) and gated_quant (2), the last also without a
// transform (BLOCK 1). One work-group a token, which takes 4 WG columns at a time, an invocation four neighbours. Two steps of the transform
// at a time are in registers. What is transformed is a row without the factors of RMSNorm (not of heads) and of the transform: they are
// factors of the whole row. The code is short, as a kernel between large products finds none of it in a cache.
layout(constant_id = 1) const int DIM = 1024;
layout(constant_id = 4) const int KIND = 0;
layout(constant_id = 5) const int NORM = 0;
layout(constant_id = 6) const int BLOCK = 1024;  // divides 4 WG, with 2 BLOCK where that is no power of four
layout(constant_id = 7) const int SIGNS = 0;
layout(constant_id = 8) const int HEAD = 128;  // divides 4 WG where NORM, or the row
layout(constant_id = 9) const int SILU = 0;
layout(constant_id = 10) const int UNTILE = 0;  // as in gated_values
BUFFER(0, readonly, int, step_data);
BUFFER(1, readonly, vec4, x);
BUFFER(2, readonly, vec4, gate);
BUFFER(3, readonly, vec4, weight);
BUFFER(4, readonly, vec4, signs);
BUFFER(5, writeonly, uint, codes);
BUFFER(6, writeonly, float, scale);
BUFFER(7, , vec4, kept);  // what has been transformed, until the row's greatest is known
layout(push_constant) uniform Push { float eps; };
#include "activation.glsl"

const uint QUADS = DIM / 4, HEADS = DIM / HEAD, SPAN = KIND == 2 && NORM != 0 ? HEAD / 4 : 1;
shared float tile[WG * 4 + WG / 4];
shared float factors[WG / SPAN];
uint place(uint i) { return i + i / 16; }

// The quad of x and gate from which quad `at` of the result comes.
uint quad_at(uint at) {
    uint to = at / (HEAD / 4);
    return UNTILE != 0 ? (to % (HEADS / UNTILE) * UNTILE + to / (HEADS / UNTILE)) * (HEAD / 4) + at % (HEAD / 4) : at;
}

KERNEL(transform_quant) {
    uint m = gl_WorkGroupID.x, lane = LANE, row = m * QUADS;
    if (m >= STEP_TOKENS) return;
    const bool normed = NORM != 0 && KIND != 2;
    float squares = 0.0, largest = 0.0;
    [[dont_unroll]] for (uint from = 0; from < QUADS; from += WG) {
        uint at = from + lane;
        bool inside = at < QUADS;
        vec4 y = vec4(0.0);
        if (inside) {
            if (KIND == 0) y = x[row + at];
            if (KIND == 1) y = act(x[2 * row + at]) * x[2 * row + QUADS + at];
            if (KIND == 2) y = x[row + quad_at(at)];
        }
        if (KIND == 2) {
            if (NORM != 0) {
                barrier();
                tile[lane] = dot(y, y);
                barrier();
                if (lane < WG / SPAN) {
                    vec4 sums = vec4(0.0);
                    for (uint i = 0; i < SPAN; i += 4) {
                        uint j = lane * SPAN + i;
                        sums += vec4(tile[j], tile[j + 1], tile[j + 2], tile[j + 3]);
                    }
                    factors[lane] = 1.0 / sqrt((sums.x + sums.y + sums.z + sums.w) / float(HEAD) + eps);
                }
                barrier();
                y *= factors[lane / SPAN];
            }
            if (inside) {
                vec4 g = gate[row + quad_at(at)];
                if (NORM != 0) y *= weight[at % (HEAD / 4)];
                y *= (SILU != 0 ? g : vec4(1.0)) / (1.0 + exp(-g));
            }
        }
        squares += dot(y, y);
        if (inside && normed) y *= weight[at];
        if (inside && SIGNS != 0) y *= signs[at];
        if (BLOCK > 1) {
            y = vec4(y.x + y.y, y.x - y.y, y.z + y.w, y.z - y.w);
            if (BLOCK > 2) y = vec4(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w);
        }
        if (BLOCK > 4) {
            // which nobody else reads any more: an invocation has read its own last
            [[unroll]] for (uint j = 0; j < 4; j++) tile[place(4 * lane + j)] = y[j];
            [[dont_unroll]] for (uint bit = 2; 1u << bit < BLOCK; bit += 2) {
                barrier();
                uint low = lane & (1u << bit) - 1 | lane >> bit << bit + 2, apart = 1u << bit;
                vec4 v = vec4(tile[place(low)], tile[place(low + apart)], tile[place(low + 2 * apart)], tile[place(low + 3 * apart)]);
                v = vec4(v.x + v.y, v.x - v.y, v.z + v.w, v.z - v.w);
                if (2 * apart < BLOCK) v = vec4(v.x + v.z, v.y + v.w, v.x - v.z, v.y - v.w);
                [[unroll]] for (uint j = 0; j < 4; j++) tile[place(low + j * apart)] = v[j];
            }
            barrier();
            [[unroll]] for (uint j = 0; j < 4; j++) y[j] = tile[place(4 * lane + j)];
        }
        largest = max(largest, max4(abs(y)));
        if (inside) kept[row + at] = y;
    }
    vec2 found = group_sum_max(squares, largest);
    float inverse = BLOCK > 1 ? 1.0 / sqrt(float(BLOCK)) : 1.0;
    if (normed) inverse /= sqrt(found.x / float(DIM) + eps);
    largest = max(found.y * inverse, QUANT_FLOOR);
    float factor = inverse * quant_factor(largest);
    [[dont_unroll]] for (uint at = lane; at < QUADS; at += WG) codes[row + at] = quantised(kept[row + at] * factor);
    if (lane == 0) scale[m] = largest / 127.0;
}
