// Subtracts its mean from every row. A workgroup a token.
struct Args { dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn center_rows(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    if (m >= step[STEP_TOKENS]) { return; }
    let quads = args.dim / 4;
    let row = m * quads;
    var sum = 0.0;
    for (var i = i32(g.lane); i < quads; i += WG) { sum += dot(x[row + i], vec4(1.0)); }
    let mean = group_sum(g, sum) / f32(args.dim);
    for (var i = i32(g.lane); i < quads; i += WG) { out[row + i] = x[row + i] - mean; }
}
