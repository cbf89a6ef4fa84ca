// Merges the parts of a split attention. A workgroup per token and head.
struct Args { heads: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(3) var<uniform> args: Args;

const QUADS = u32(DIM / 4);

@compute @workgroup_size(WG)
fn attention_merge(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let row = m * args.heads + grid.id.y;
    let from_part = row * u32(SPLITS) * (QUADS + 1u);
    var largest = LOWEST;
    for (var s = 0u; s < u32(SPLITS); s++) { largest = max(largest, parts[from_part + s * (QUADS + 1u) + QUADS].x); }
    for (var i = g.lane; i < QUADS; i += u32(WG)) {
        var sum = vec4(0.0);
        var total = 0.0;
        for (var s = 0u; s < u32(SPLITS); s++) {
            let part = from_part + s * (QUADS + 1u);
            let factor = exp(parts[part + QUADS].x - largest);
            sum += factor * parts[part + i];
            total += factor * parts[part + QUADS].y;
        }
        out[row * QUADS + i] = sum / total;
    }
}
