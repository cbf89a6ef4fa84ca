// norm_quant of the parts of an attention, which are put together here. A workgroup a token.
struct Args { eps: f32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read_write> scale: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

const QUADS = u32(COLS / 4);
#include "row_quant.wgsl"

fn keep(m: u32, i: u32, word: u32) { out[m * QUADS + i] = word; }

@compute @workgroup_size(WG)
fn merge_quant(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let row = take_row(g, m);
    if (g.lane == 0u) { scale[m] = row.scale; }
}
