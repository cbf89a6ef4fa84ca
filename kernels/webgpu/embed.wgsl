// out[m] = table[tokens[m]], for the rows of the table that are bound: from `first` on, `rows` of them. A workgroup a token.
struct Args { tokens: i32, quads: i32, first: i32, rows: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if WEIGHT_F16
@group(0) @binding(1) var<storage, read> table: array<vec2<u32>>;
#else
@group(0) @binding(1) var<storage, read> table: array<vec4<u32>>;
#endif
@group(0) @binding(2) var<storage, read_write> out: array<vec4<u32>>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn embed(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    if (m >= step[STEP_TOKENS]) { return; }
    let row = step[args.tokens + m] - args.first;
    if (row < 0 || row >= args.rows) { return; }
    for (var i = i32(g.lane); i < args.quads; i += WG) {
        let words = table[row * args.quads + i];
#if WEIGHT_F16
        out[m * args.quads + i] = bitcast<vec4<u32>>(halves(words));
#else
        out[m * args.quads + i] = words;
#endif
    }
}
