// variants: SUBGROUPS DOT
// out[n] = f32(sum of x[k] w[n, k]) * (scale * w_scale[n]) for one token, whose x is made int8 here where it comes as f32.
// LANES invocations share a row of W and have its loads in flight before x is there; x is read once, too. The products are of
// codes (w + 1); the sum of x, which the offset adds too often, is taken off at the end.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int LANES = 4;
layout(constant_id = 3) const int INPUT = 0;  // 0: int8 with a scale; 1: f32; 2: f32 before RMSNorm
layout(constant_id = 4) const int GLU = 0;    // rows n and n + rows / 2 are gate and up of out[n]
layout(constant_id = 5) const int RELU2 = 0;
layout(constant_id = 6) const int ADD = 0;
layout(constant_id = 7) const int CHUNKS = 2;  // of a row of codes, 16 bytes each: two for every 128 columns
layout(constant_id = 8) const int PITCH = 4;   // from one plane of x to the next: CHUNKS, and what lets them fall into different banks
BUFFER(0, readonly, uvec4, x);
BUFFER(1, readonly, float, scale);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { float eps; int rows; };
const uint QUADS = COLS / 4;
const int EARLY = (CHUNKS + LANES - 1) / LANES;  // chunks of an invocation, of which up to 8 are loaded early
const int HELD = (COLS / 4 + WG - 1) / WG;       // quads of x of an invocation, of which up to 8 are kept
shared uvec4 x_quads[4 * PITCH];  // what a chunk's four bit pairs are multiplied with is PITCH apart
shared int x_sum;
#if !SUBGROUPS
shared ivec2 partial[WG];
#endif

vec4 gain_of(uint i) { return INPUT == 2 ? weight[i] : vec4(1.0); }

// Puts the i-th word of four activations in its place; returns their sum.
int put(uint i, uint word) {
    if (i < 16 * CHUNKS) x_quads[i % 32 / 8 * PITCH + i / 32 * 2 + i % 8 / 4][i % 4] = word;
    return dot4(0x01010101u, word, 0);
}

// Fills x_quads and x_sum; returns the scale.
float take_x(uint lane) {
    if (lane == 0) x_sum = 0;
    float unit = 0.0;
    int sum = 0;
    if (INPUT != 0) {
        float squares = 0.0, largest = 0.0;
        vec4 v[8], gain[8];
#define LOAD(i) if (i < HELD && lane + i * WG < QUADS) { v[i] = uintBitsToFloat(x[lane + i * WG]); gain[i] = gain_of(lane + i * WG); } \
                else { v[i] = vec4(0.0); gain[i] = vec4(0.0); }
#define LOOK(i) if (i < HELD) { squares += dot(v[i], v[i]); v[i] *= gain[i]; largest = max(largest, max4(abs(v[i]))); }
        REPEAT_8(LOAD)
        REPEAT_8(LOOK)
        for (uint i = lane + 8 * WG; i < QUADS; i += WG) {
            vec4 more = uintBitsToFloat(x[i]);
            squares += dot(more, more);
            largest = max(largest, max4(abs(more * gain_of(i))));
        }
        vec2 found = group_sum_max(squares, largest);  // its barriers also publish x_sum
        float inverse = INPUT == 2 ? 1.0 / sqrt(found.x / float(COLS) + eps) : 1.0;
        largest = max(found.y * inverse, QUANT_FLOOR);
        float factor = inverse * quant_factor(largest);
        unit = largest / 127.0;
#define PUT(i) if (i < HELD && lane + i * WG < QUADS) sum += put(lane + i * WG, quantised(v[i] * factor));
        REPEAT_8(PUT)
        for (uint i = lane + 8 * WG; i < QUADS; i += WG)
            sum += put(i, quantised(uintBitsToFloat(x[i]) * gain_of(i) * factor));
        for (uint i = QUADS + lane; i < 16 * CHUNKS; i += WG) put(i, 0);
    } else {
        barrier();
        unit = scale[0];
        for (uint i = lane; i < 16 * CHUNKS; i += WG) sum += put(i, i < QUADS ? x[i / 4][i % 4] : 0);
    }
#if SUBGROUPS
    sum = subgroupAdd(sum);
    if (gl_SubgroupInvocationID == 0) atomicAdd(x_sum, sum);
#else
    atomicAdd(x_sum, sum);
#endif
    barrier();
    return unit;
}

int product(uvec4 chunk, int pair, uvec4 v, int sum) {
    sum = dot4(codes_of(chunk.x, pair), v.x, sum);
    sum = dot4(codes_of(chunk.y, pair), v.y, sum);
    sum = dot4(codes_of(chunk.z, pair), v.z, sum);
    return dot4(codes_of(chunk.w, pair), v.w, sum);
}

// Products of 64 weights of one row, and of one more where GLU, added to the sums.
ivec2 products(uvec4 first, uvec4 second, uint chunk, ivec2 sums) {
    if (chunk >= CHUNKS) return sums;
#define PLANE(p) { \
        uvec4 v = x_quads[p * PITCH + chunk]; \
        sums.x = product(first, 3 - p, v, sums.x); \
        if (GLU != 0) sums.y = product(second, 3 - p, v, sums.y); \
    }
    PLANE(0) PLANE(1) PLANE(2) PLANE(3)
    return sums;
}

float act(float gate) {
    float positive = max(gate, 0.0);
    return RELU2 != 0 ? positive * positive : gate / (1.0 + exp(-gate));
}

float scaled(int sum, float unit, uint n) {
    precise float factor = unit * w_scale[n];
    precise float value = float(sum - x_sum) * factor;
    return value;
}

KERNEL(ternary_decode) {
    uint lane = LANE, part = lane % LANES;
    uint outs = GLU != 0 ? rows / 2 : rows;
    uint n = gl_WorkGroupID.x * (WG / LANES) + lane / LANES;
    uint row = min(n, outs - 1) * CHUNKS, up = GLU != 0 ? row + outs * CHUNKS : row;
    uvec4 first[8], second[8];
#define FETCH(i) if (i < EARLY) { \
        uint chunk = min(part + i * LANES, CHUNKS - 1); \
        first[i] = codes[row + chunk]; \
        second[i] = GLU != 0 ? codes[up + chunk] : uvec4(0); \
    }
    REPEAT_8(FETCH)
    float unit = take_x(lane);
    ivec2 sums = ivec2(0);
#define MULTIPLY(i) if (i < EARLY) sums = products(first[i], second[i], part + i * LANES, sums);
    REPEAT_8(MULTIPLY)
    for (uint chunk = part + 8 * LANES; chunk < CHUNKS; chunk += LANES)
        sums = products(codes[row + chunk], GLU != 0 ? codes[up + chunk] : uvec4(0), chunk, sums);
#if SUBGROUPS
    for (uint apart = LANES / 2; apart > 0; apart /= 2) {
        sums.x += subgroupShuffleXor(sums.x, apart);
        if (GLU != 0) sums.y += subgroupShuffleXor(sums.y, apart);
    }
#else
    partial[lane] = sums;
    barrier();
    if (part == 0)
        for (int i = 1; i < LANES; i++) sums += partial[lane + i];
#endif
    if (part != 0 || n >= outs) return;
    float value = scaled(sums.x, unit, n);
    if (GLU != 0) value = act(value) * scaled(sums.y, unit, n + outs);
    if (ADD != 0) {
        precise float total = result[n] + value;
        value = total;
    }
    result[n] = value;
}
