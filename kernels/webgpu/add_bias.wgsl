// Adds a bias to every row. A workgroup a token.
struct Args { dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn add_bias(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    if (m >= step[STEP_TOKENS]) { return; }
    let quads = args.dim / 4;
    for (var i = i32(g.lane); i < quads; i += WG) { x[m * quads + i] += bias[i]; }
}
