// RMSNorm of each head of q and of k in place, before they are rotated. A workgroup per token and head (q heads, k heads); WG divides DIM.
struct Args { eps: f32, heads: i32, kv_heads: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> q_norm: array<f32>;
@group(0) @binding(3) var<storage, read> k_norm: array<f32>;
@group(0) @binding(4) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn head_norms(grid: Grid, g: Group) {
    let m = i32(grid.id.x);
    let tokens = step[STEP_TOKENS];
    let head = i32(grid.id.y);
    let row = (min(m, tokens - 1) * (args.heads + 2 * args.kv_heads) + head) * DIM;
    var squares = 0.0;
    for (var i = i32(g.lane); i < DIM; i += WG) { squares += qkv[row + i] * qkv[row + i]; }
    let root = sqrt(group_sum(g, squares) / f32(DIM) + args.eps);
    if (m >= tokens) { return; }  // not before the sum: a browser's compiler would forbid its barriers
    for (var i = i32(g.lane); i < DIM; i += WG) {
        var gain = k_norm[i];
        if (head < args.heads) { gain = q_norm[i]; }
        qkv[row + i] = qkv[row + i] * gain / root;
    }
}
