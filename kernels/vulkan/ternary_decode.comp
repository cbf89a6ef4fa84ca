// variants: SUBGROUPS DOT
// out[n] = f32(sum of x[k] w[n, k]) * (scale * w_scale[n]) for one token, whose x is made int8 here where it comes as f32.
// LANES invocations share a row of W and have all its loads in flight before x is there. The products are of codes
// (w + 1); the sum of x, which the offset adds too often, is taken off at the end.
layout(constant_id = 1) const int COLS = 128;
layout(constant_id = 2) const int LANES = 4;
layout(constant_id = 3) const int INPUT = 0;  // 0: int8 with a scale; 1: f32; 2: f32 before RMSNorm
layout(constant_id = 4) const int GLU = 0;    // rows n and n + rows / 2 are gate and up of out[n]
layout(constant_id = 5) const int RELU2 = 0;
layout(constant_id = 6) const int ADD = 0;
layout(constant_id = 7) const int SLOTS = 8;  // uint quads of x, as COLS padded to 128: 8 a block
layout(constant_id = 8) const int EACH = 1;   // quads of codes of an invocation: SLOTS / 4 / LANES, rounded up
layout(constant_id = 9) const int EARLY = 1;  // of those, the ones loaded before x is there
BUFFER(0, readonly, uvec4, x);
BUFFER(1, readonly, float, scale);
BUFFER(2, readonly, vec4, weight);
BUFFER(3, readonly, uvec4, codes);
BUFFER(4, readonly, float, w_scale);
BUFFER(5, , float, result);
layout(push_constant) uniform Push { float eps; int rows; };
shared uint x_words[4 * SLOTS];
shared int x_sum;
#if !SUBGROUPS
shared ivec2 partial[WG];
#endif

vec4 normed(uint i) {
    vec4 v = uintBitsToFloat(x[i]);
    return INPUT == 2 ? v * weight[i] : v;
}

// Fills x_words and x_sum; returns the scale.
float take_x(int lane) {
    if (lane == 0) x_sum = 0;
    const uint quads = COLS / 4;
    float factor = 0.0, unit = 0.0;
    if (INPUT != 0) {
        float squares = 0.0, largest = 0.0;
        for (uint i = lane; i < quads; i += WG) {
            vec4 v = uintBitsToFloat(x[i]);
            squares += dot(v, v);
            largest = max(largest, max4(abs(normed(i))));
        }
        vec2 found = group_sum_max(squares, largest);  // its barriers also publish x_sum
        float inverse = INPUT == 2 ? 1.0 / sqrt(found.x / float(COLS) + eps) : 1.0;
        largest = max(found.y * inverse, QUANT_FLOOR);
        factor = inverse * quant_factor(largest);
        unit = largest / 127.0;
    } else {
        barrier();
        unit = scale[0];
    }
    int sum = 0;
    for (uint i = lane; i < 4 * SLOTS; i += WG) {
        uint word = 0;
        if (i < quads) word = INPUT != 0 ? quantised(normed(i) * factor) : x[i / 4][i % 4];
        x_words[i] = word;
        sum = dot4(0x01010101u, word, sum);
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

// Products of 64 weights: quad q of a row holds, of block q / 2, half q % 2 of each of four runs of 32.
int product(uvec4 quad, uint q, int sum) {
    uint at = q / 2 * 32 + q % 2 * 4;
    [[unroll]] for (int plane = 0; plane < 4; plane++)
        [[unroll]] for (int j = 0; j < 4; j++)
            sum = dot4(codes_of(quad[j], 3 - plane), x_words[at + 8 * plane + j], sum);
    return sum;
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
    int lane = LANE, part = lane % LANES;
    const uint quads = SLOTS / 4;
    uint outs = GLU != 0 ? rows / 2 : rows;
    uint n = gl_WorkGroupID.x * (WG / LANES) + lane / LANES;
    uint row = min(n, outs - 1) * quads, up = GLU != 0 ? row + outs * quads : row;
    uvec4 first[EARLY], second[EARLY];
    [[unroll]] for (int i = 0; i < EARLY; i++) {
        uint q = min(part + i * LANES, quads - 1);
        first[i] = codes[row + q];
        if (GLU != 0) second[i] = codes[up + q];
    }
    float unit = take_x(lane);
    ivec2 sums = ivec2(0);
    [[unroll]] for (int i = 0; i < EARLY; i++) {
        uint q = part + i * LANES;
        if (q < quads) {
            sums.x = product(first[i], q, sums.x);
            if (GLU != 0) sums.y = product(second[i], q, sums.y);
        }
    }
    for (uint q = part + EARLY * LANES; q < quads; q += LANES) {
        sums.x = product(codes[row + q], q, sums.x);
        if (GLU != 0) sums.y = product(codes[up + q], q, sums.y);
    }
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
