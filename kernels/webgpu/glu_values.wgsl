// Rows that a transform takes, as f32: act(gate) * up. A workgroup a token.
struct Args { dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn glu_values(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let quads = u32(args.dim) / 4u;
    for (var i = g.lane; i < quads; i += u32(WG)) {
        out[m * quads + i] = activation(gate_up[2u * m * quads + i]) * gate_up[(2u * m + 1u) * quads + i];
    }
}
