// norm_tokens: RMSNorm (where NORM) of the rows of all tokens, in f32, added to `out` where ADD. Also what a transform takes. A workgroup
// a token.
struct Args { eps: f32, dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn norm_values(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let quads = u32(args.dim) / 4u;
    let row = m * quads;
#if NORM
    var squares = 0.0;
    for (var i = g.lane; i < quads; i += u32(WG)) { squares += dot(x[row + i], x[row + i]); }
    let inverse = 1.0 / sqrt(group_sum(g, squares) / f32(args.dim) + args.eps);
#if ADD
    let zero = vec4(u32(args.dim) >> 31u);  // keeps a compiler from fusing the sum: see `rounded`
    for (var i = g.lane; i < quads; i += u32(WG)) {
        let v = x[row + i] * inverse * weight[i];
        out[row + i] += bitcast<vec4<f32>>(bitcast<vec4<u32>>(v) | zero);
    }
#else
    for (var i = g.lane; i < quads; i += u32(WG)) { out[row + i] = x[row + i] * inverse * weight[i]; }
#endif
#else
    for (var i = g.lane; i < quads; i += u32(WG)) { out[row + i] = x[row + i]; }
#endif
}
