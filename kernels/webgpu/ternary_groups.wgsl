// ternary_matmul of weights with a scale for each group of columns, for a few tokens. LANES invocations share HELD rows of W. Each takes a unit of
// columns at a time (a block of 128, or a group of more), and puts the terms of its groups into workgroup memory, where they are
// added up. PITCH: of a row's terms there, COUNT at least.
#include "ternary_group.wgsl"
const UNITS = (COUNT + u32(EACH) - 1u) / u32(EACH);
const STRIDE = u32(LANES);
const ROWS = u32(WG) / STRIDE * u32(HELD);
var<workgroup> terms: array<f32, ROWS * u32(TOKENS * PITCH)>;

// For one token, codes stay where they are in their bytes, but those of the top bit pair, which would not be signed bytes: the sum is
// shifted once, and the activations' sum taken off, as codes are w + 1. For more tokens, signed weights save the activations' sums.
fn place_of(plane: u32) -> u32 { return select(6u - 2u * plane, 4u, plane == 0u); }

fn operand(quad: vec4<u32>, plane: u32) -> vec4<u32> {
    if (TOKENS > 1) { return weights_of(quad, plane); }
    return (quad >> vec4(select(0u, 2u, plane == 0u))) & vec4(0x03030303u << place_of(plane));
}

fn part(sum: i32, plane: u32, total: i32) -> i32 {
    if (TOKENS > 1) { return sum; }
    return (sum >> place_of(plane)) - total;
}

@compute @workgroup_size(WG)
fn ternary_groups(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let tokens = u32(step[STEP_TOKENS]);
    let n0 = (id.y * count.x + id.x) * ROWS;
    let m0 = id.z * u32(TOKENS);
    if (m0 >= tokens || n0 >= args.rows) { return; }
    let slot = lane / STRIDE * u32(HELD);
    for (var unit = lane % STRIDE; unit < UNITS; unit += STRIDE) {
        var found = array<array<array<i32, 4>, TOKENS>, HELD>();  // a sum of each plane
        var total = array<i32, 4>();
        for (var b = 0u; b < BLOCKS; b++) {
            let block = unit * BLOCKS + b;
            var low: array<vec4<u32>, HELD>;
            var high: array<vec4<u32>, HELD>;
#repeat r HELD
            let at = min(n0 + slot + r, args.rows - 1u) * ROW + 2u * block;
            low[r] = codes[at];
            high[r] = codes[at + 1u];
#end
#repeat plane 4
            var w: array<vec4<u32>, HELD>;
            var u: array<vec4<u32>, HELD>;
#repeat r HELD
            w[r] = operand(low[r], plane);
            u[r] = operand(high[r], plane);
#end
#repeat t TOKENS
            let m = min(m0 + t, tokens - 1u);
            let v = load_x(m, block * 8u + 2u * plane);
            let y = load_x(m, block * 8u + 2u * plane + 1u);
            if (TOKENS == 1) { total[plane] += dot16(vec4(0x01010101u), v) + dot16(vec4(0x01010101u), y); }
#repeat r HELD
            found[r][t][plane] += dot16(w[r], v) + dot16(u[r], y);
#end
#end
#end
        }
#repeat r HELD
#repeat j EACH
        let s = unit * u32(EACH) + j;
        let n = min(n0 + slot + r, args.rows - 1u);
        if (s < COUNT) {
#repeat t TOKENS
            var sum = 0;
#repeat p PLANES
            sum += part(found[r][t][j * u32(PLANES) + p], j * u32(PLANES) + p, total[j * u32(PLANES) + p]);
#end
            terms[((slot + r) * u32(TOKENS) + t) * u32(PITCH) + s] = term(sum, n, s);
#end
        }
#end
#end
    }
    workgroupBarrier();
    for (var i = lane; i < ROWS * u32(TOKENS); i += u32(WG)) {
        let m = m0 + i % u32(TOKENS);
        let n = n0 + i / u32(TOKENS);
        if (m >= tokens || n >= args.rows) { continue; }
        var sum = 0.0;
        for (var s = 0u; s < COUNT; s++) { sum = added(sum, terms[i * u32(PITCH) + s]); }
        store(m, n, sum);
    }
}
