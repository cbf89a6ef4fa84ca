// Puts the rows of a product into columns of a wider matrix, from `first` on, or adds them (where ADD). A workgroup a token.
struct Args { columns: i32, width: i32, first: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> product: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn put_columns(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    if (m >= step[STEP_TOKENS]) { return; }
    for (var i = i32(g.lane); i < args.columns; i += WG) {
        let to = m * args.width + args.first + i;
        let value = product[m * args.columns + i];
#if ADD
        out[to] += value;
#else
        out[to] = value;
#endif
    }
}
