// Put in front of every kernel here. Lines with # are for bitnet.webgpu.source: WGSL has no preprocessor. Indexing of an array of
// an invocation's own is repeated as text, not looped over: its elements are registers, and loads do not wait for one another.
// WG is the number of invocations of a workgroup; SUBGROUPS and INT8_DOT are the device's features. Buffers are bound in the order
// of a launch's arguments; its scalars follow, in their order, in one uniform `args`.

// Apart from Group: WGSL holds a structure for uniform only if all of its members are, and barriers need uniform conditions.
struct Grid {
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
}

struct Group {
    @builtin(local_invocation_index) lane: u32,
#if SUBGROUPS
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) sublane: u32,
#endif
}

// Words of the step buffer's header: tokens (M), sequences (S), rows (R), decode steps done in this run.
const STEP_TOKENS = 0;
const STEP_SEQS = 1;
const STEP_ROWS = 2;
const STEP_DONE = 3;
const STEP_LOGPROBS = 6;

// Below every computed score; WGSL has no literal for infinity.
const LOWEST = -3.0e38;
// The least magnitude that absmax quantisation divides by.
const QUANT_FLOOR = 1e-5;

var<workgroup> reduction: array<vec2<f32>, WG>;

// Over the workgroup: the sum of x and the greatest y, the same in every invocation.
fn group_sum_max(g: Group, value: vec2<f32>) -> vec2<f32> {
    workgroupBarrier();
#if SUBGROUPS
    let part = vec2(subgroupAdd(value.x), subgroupMax(value.y));
    if (g.sublane == 0u) { reduction[g.subgroup] = part; }
    workgroupBarrier();
    // Without another round of shuffles, which is slow (decision 0071).
    var all = reduction[0];
    for (var i = 1u; i < g.subgroups; i++) {
        all = vec2(all.x + reduction[i].x, max(all.y, reduction[i].y));
    }
    return all;
#else
    reduction[g.lane] = value;
    for (var half = u32(WG) / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (g.lane < half) {
            let a = reduction[g.lane];
            let b = reduction[g.lane + half];
            reduction[g.lane] = vec2(a.x + b.x, max(a.y, b.y));
        }
    }
    workgroupBarrier();
    return reduction[0];
#endif
}

fn group_sum(g: Group, value: f32) -> f32 { return group_sum_max(g, vec2(value, 0.0)).x; }

fn group_max(g: Group, value: f32) -> f32 { return group_sum_max(g, vec2(0.0, value)).y; }

// An integer that orders as the float does.
fn float_key(z: f32) -> u32 {
    let bits = select(bitcast<u32>(z), 0u, z == 0.0);  // -0 is 0
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn no_number(z: f32) -> bool { return (bitcast<u32>(z) & 0x7FFFFFFFu) > 0x7F800000u; }

// Four signed products of bytes, added.
fn dot4(a: u32, b: u32) -> i32 {
#if INT8_DOT
    return dot4I8Packed(a, b);
#else
    let s = bitcast<i32>(a);
    let t = bitcast<i32>(b);
    return extractBits(s, 0u, 8u) * extractBits(t, 0u, 8u) + extractBits(s, 8u, 8u) * extractBits(t, 8u, 8u)
         + extractBits(s, 16u, 8u) * extractBits(t, 16u, 8u) + extractBits(s, 24u, 8u) * extractBits(t, 24u, 8u);
#endif
}

fn dot16(a: vec4<u32>, b: vec4<u32>) -> i32 { return dot4(a.x, b.x) + dot4(a.y, b.y) + dot4(a.z, b.z) + dot4(a.w, b.w); }

// 16 weights as signed bytes, from the bit pairs of four words of codes: plane 0 is the top pair.
fn weights_of(codes: vec4<u32>, plane: u32) -> vec4<u32> {
    let pairs = (codes >> vec4(6u - 2u * plane)) & vec4(0x03030303u);
    return ((pairs | vec4(0x80808080u)) - vec4(0x01010101u)) ^ vec4(0x80808080u);
}

// Sixteen codes, w + 1 in two bits, as two's complement of w. A plane of them at the top of its bytes counts 64-fold, which UNFOLD undoes.
fn signed_codes(codes: vec4<u32>) -> vec4<u32> {
    return (~codes & vec4(0x55555555u)) | (~(codes | (codes << vec4(1u))) & vec4(0xAAAAAAAAu));
}

fn plane_of(weights: vec4<u32>, plane: u32) -> vec4<u32> { return (weights << vec4(2u * plane)) & vec4(0xC0C0C0C0u); }

const UNFOLD = 0.015625;

// sum + a . b, each product fused into the sum.
fn fused_dot(a: vec4<f32>, b: vec4<f32>, sum: f32) -> f32 { return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum)))); }

fn magnitude(y: vec4<f32>) -> f32 {
    let a = abs(y);
    return max(max(a.x, a.y), max(a.z, a.w));
}

// Factor of absmax quantisation; exactly 1 where the greatest magnitude is 127, however the device divides.
fn quant_factor(largest: f32) -> f32 { return select(127.0 / largest, 1.0, largest == 127.0); }

fn quant_scale(largest: f32) -> f32 { return select(largest / 127.0, 1.0, largest == 127.0); }

// Returns the value, and keeps a compiler from fusing or reordering it with the next operation. WGSL cannot forbid that, but
// `zero` is an integer that only the host knows to be 0.
fn rounded(value: f32, zero: u32) -> f32 { return bitcast<f32>(bitcast<u32>(value) | zero); }

// f32(sum) * (a * b), each product rounded once, and so is a sum that follows.
fn scaled(sum: i32, a: f32, b: f32, zero: u32) -> f32 { return rounded(f32(sum) * rounded(a * b, zero), zero); }

// A sum that began at 0. Nothing keeps a device from dropping that 0: -0 terms alone would leave -0.
fn from_zero(sum: f32) -> f32 { return bitcast<f32>(select(bitcast<u32>(sum), 0u, bitcast<u32>(sum) == 0x80000000u)); }

// Four floats to four bytes.
fn quantised(y: vec4<f32>) -> u32 {
    let q = vec4<u32>(vec4<i32>(clamp(round(y), vec4(-128.0), vec4(127.0)))) & vec4(255u);
    return q.x | (q.y << 8u) | (q.z << 16u) | (q.w << 24u);
}

// Four f16 of two words, exactly.
fn halves(words: vec2<u32>) -> vec4<f32> { return vec4(unpack2x16float(words.x), unpack2x16float(words.y)); }

#if RELU2
fn activation(gate: vec4<f32>) -> vec4<f32> {
    let g = max(gate, vec4(0.0));
    return g * g;
}
#else
#if GELU
fn activation(gate: vec4<f32>) -> vec4<f32> {
    return gate / (1.0 + exp(-1.5957691216 * gate * (1.0 + 0.044715 * gate * gate)));  // (1 + tanh(z)) / 2 = sigmoid(2z); 2 sqrt(2 / pi)
}
#else
fn activation(gate: vec4<f32>) -> vec4<f32> { return gate / (1.0 + exp(-gate)); }
#endif
#endif
