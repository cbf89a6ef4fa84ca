// Rows that a transform or a quantisation takes, as f32: each head of x, after RMSNorm where NORM, times silu (where SILU) or the sigmoid of
// its gate. A workgroup a head of a token. UNTILE: the number of key heads, if value heads are put from the tiled order into the other.
struct Args { eps: f32, dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> gate: array<f32>;
@group(0) @binding(3) var<storage, read> weight: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn gated_values(grid: Grid, g: Group) {
    let m = grid.id.y;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let row = m * u32(args.dim);
    let head = row + grid.id.x * u32(HEAD);
#if NORM
    var squares = 0.0;
    for (var i = g.lane; i < u32(HEAD); i += u32(WG)) { squares += x[head + i] * x[head + i]; }
    let factor = 1.0 / sqrt(group_sum(g, squares) / f32(HEAD) + args.eps);
#endif
#if UNTILE
    let to = grid.id.x % u32(UNTILE) * (grid.count.x / u32(UNTILE)) + grid.id.x / u32(UNTILE);
#else
    let to = grid.id.x;
#endif
    for (var i = g.lane; i < u32(HEAD); i += u32(WG)) {
        var value = x[head + i] / (1.0 + exp(-gate[head + i]));
#if SILU
        value *= gate[head + i];
#endif
#if NORM
        value *= factor * weight[i];
#endif
        out[row + to * u32(HEAD) + i] = value;
    }
}
