// ternary_matmul of weights with a scale for each group of columns, for a few tokens. LANES invocations share HELD rows of W. Each takes a unit of
// columns at a time (a block of 128, or a group of more), and puts the terms of its groups into workgroup memory, where they are
// added up. PITCH: of a row's terms there, COUNT and SUMS at least.
#include "ternary_group.wgsl"
const UNITS = (COUNT + u32(EACH) - 1u) / u32(EACH);
const STRIDE = u32(LANES);
const ROWS = u32(WG) / STRIDE * u32(HELD);
var<workgroup> terms: array<f32, ROWS * u32(TOKENS * PITCH)>;

@compute @workgroup_size(WG)
fn ternary_groups(g: Group) {
    let tokens = u32(step[STEP_TOKENS]);
    let n0 = (g.id.y * g.count.x + g.id.x) * ROWS;
    let m0 = g.id.z * u32(TOKENS);
    if (m0 >= tokens || n0 >= args.rows) { return; }
    let slot = g.lane / STRIDE * u32(HELD);
    for (var unit = g.lane % STRIDE; unit < UNITS; unit += STRIDE) {
        var found = array<array<array<i32, EACH>, TOKENS>, HELD>();
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
            w[r] = weights_of(low[r], plane);
            u[r] = weights_of(high[r], plane);
#end
#repeat t TOKENS
            let m = min(m0 + t, tokens - 1u);
            let v = load_x(m, block * 8u + 2u * plane);
            let y = load_x(m, block * 8u + 2u * plane + 1u);
#repeat r HELD
            found[r][t][plane * u32(EACH) / 4u] += dot16(w[r], v) + dot16(u[r], y);
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
            terms[((slot + r) * u32(TOKENS) + t) * u32(PITCH) + s] = term(found[r][t][j], n, s);
#end
        }
#end
#end
    }
    workgroupBarrier();
    for (var i = g.lane; i < ROWS * u32(TOKENS) * CHAINS; i += u32(WG)) {  // a partial sum each, which takes the place of its first term
        let row = i / CHAINS * u32(PITCH);
        let p = i % CHAINS;
        var sum = 0.0;
        for (var s = p; s < COUNT; s += CHAINS) { sum = added(sum, terms[row + s]); }
        terms[row + p] = sum;
    }
    workgroupBarrier();
    for (var i = g.lane; i < ROWS * u32(TOKENS); i += u32(WG)) {
        let row = i * u32(PITCH);
        let m = m0 + i % u32(TOKENS);
        let n = n0 + i / u32(TOKENS);
        if (m >= tokens || n >= args.rows) { continue; }
        for (var part = CHAINS / 2u; part > 0u; part /= 2u) {
            for (var p = 0u; p < part; p++) { terms[row + p] = added(terms[row + p], terms[row + part + p]); }
        }
        store(m, n, terms[row]);
    }
}
