// embed from a ternary table: out[m] = table[tokens[m]], for the rows that are bound. A workgroup a token.
struct Args { tokens: u32, first: u32, rows: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(2) var<storage, read> w_scale: array<u32>;  // two f16 each
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(4) var<uniform> args: Args;
#include "table.wgsl"

@compute @workgroup_size(WG)
fn table_embed(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    if (i32(id.x) >= step[STEP_TOKENS]) { return; }
    let row = u32(step[args.tokens + id.x]) - args.first;  // one before the first is a great number
    if (row >= args.rows) { return; }
    for (var i = lane; i < QUADS; i += u32(WG)) {
        let k = 4u * i;
        out[id.x * QUADS + i] = signs_at(codes[row * ROW + k / 128u * 8u + k % 32u / 4u], k) * unit_at(row, k);
    }
}
