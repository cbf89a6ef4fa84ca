// RMSNorm of the rows that need logits. A workgroup a row.
struct Args { rows: i32, eps: f32, dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn norm_rows(grid: Grid, g: Group) {
    let r = i32(grid.id.x);
    if (r >= step[STEP_ROWS]) { return; }
    let quads = args.dim / 4;
    let row = step[args.rows + r] * quads;
    var squares = 0.0;
    for (var i = i32(g.lane); i < quads; i += WG) { squares += dot(x[row + i], x[row + i]); }
    let inverse = 1.0 / sqrt(group_sum(g, squares) / f32(args.dim) + args.eps);
    for (var i = i32(g.lane); i < quads; i += WG) { out[r * quads + i] = x[row + i] * inverse * weight[i]; }
}
