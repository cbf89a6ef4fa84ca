// dense_matmul of a ternary table: out[r, n] = x[r] . table[n] with f32 sums, for the rows that are bound: `rows` of `total`. LANES
// invocations share EACH of them, and TOKENS rows of x share a read of the table.
struct Args { rows: u32, first: u32, total: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> w_scale: array<u32>;  // two f16 each
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;
#include "table.wgsl"

const SUMS = u32(EACH * TOKENS);
const ROWS = u32(WG / LANES * EACH);
var<workgroup> parts: array<f32, u32(WG) * SUMS>;

@compute @workgroup_size(WG)
fn table_matmul(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let count = u32(step[STEP_ROWS]);
    let t0 = id.z * u32(TOKENS);
    let n0 = (id.y * groups.x + id.x) * ROWS;
    if (t0 >= count || n0 >= args.rows) { return; }
    let own = n0 + lane / u32(LANES) * u32(EACH);
    var sums: array<f32, SUMS>;
    for (var i = lane % u32(LANES); i < ROW; i += u32(LANES)) {
        var words: array<u32, EACH>;
#repeat e EACH
        words[e] = codes[min(own + e, args.rows - 1u) * ROW + i];
#end
#repeat pair 4
        let k = i / 8u * 128u + pair * 32u + i % 8u * 4u;
        if (k < u32(COLS)) {
            var w: array<vec4<f32>, EACH>;
            var units: array<f32, EACH>;
#repeat e EACH
            w[e] = signs_at(words[e], k);
            units[e] = unit_at(min(own + e, args.rows - 1u), k);
#end
#repeat t TOKENS
            let v = x[min(t0 + t, count - 1u) * QUADS + k / 4u];
#repeat e EACH
            sums[e * u32(TOKENS) + t] += units[e] * dot(w[e], v);
#end
#end
        }
#end
    }
#repeat e EACH
#repeat t TOKENS
    parts[lane * SUMS + e * u32(TOKENS) + t] = sums[e * u32(TOKENS) + t];
#end
#end
    workgroupBarrier();
    for (var i = lane; i < ROWS * u32(TOKENS); i += u32(WG)) {
        let n = n0 + i / u32(TOKENS);
        let t = t0 + i % u32(TOKENS);
        if (n >= args.rows || t >= count) { continue; }
        let slot = i / u32(TOKENS) / u32(EACH) * u32(LANES);
        var sum = 0.0;
        for (var l = 0u; l < u32(LANES); l++) { sum += parts[(slot + l) * SUMS + i % SUMS]; }
        out[t * args.total + args.first + n] = sum;
    }
}
