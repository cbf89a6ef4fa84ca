// Grid: [columns, tokens]. The results of a token's experts times their shares, added in the order of the router, then to `sums`.
struct Args { top: u32, columns: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> results: array<f32>;
@group(0) @binding(2) var<storage, read> shares: array<f32>;
@group(0) @binding(3) var<storage, read_write> sums: array<f32>;
@group(0) @binding(4) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn expert_sums(grid: Grid, g: Group) {
    let n = grid.id.x * u32(WG) + g.lane;
    let m = grid.id.y;
    if (n >= args.columns || m >= u32(step[STEP_TOKENS])) { return; }
    let zero = args.columns >> 31u;
    var sum = 0.0;
    for (var j = 0u; j < args.top; j++) {
        let pair = m * args.top + j;
        sum = rounded(sum + rounded(results[pair * args.columns + n] * shares[pair], zero), zero);
    }
    sums[m * args.columns + n] += from_zero(sum);
}
