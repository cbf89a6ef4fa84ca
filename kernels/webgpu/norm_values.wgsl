// Rows that a transform takes, as f32: x after RMSNorm where NORM. A workgroup a token.
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
    for (var i = g.lane; i < quads; i += u32(WG)) { out[row + i] = x[row + i] * inverse * weight[i]; }
#else
    for (var i = g.lane; i < quads; i += u32(WG)) { out[row + i] = x[row + i]; }
#endif
}
