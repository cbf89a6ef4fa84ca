// Decays and strengths of the delta rule, from the norm of a row and two small products. A workgroup a head of a token. The norm is one
// factor of the whole row, so all three sums are found together.
struct Args { eps: f32, dim: i32, heads: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> alpha: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> beta: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read> rate: array<f32>;
@group(0) @binding(7) var<storage, read_write> out: array<f32>;
@group(0) @binding(8) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn delta_gates(grid: Grid, g: Group) {
    let h = grid.id.x;
    let m = grid.id.y;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let quads = u32(args.dim) / 4u;
    var squares = 0.0;
    var products = vec2(0.0);
    for (var i = g.lane; i < quads; i += u32(WG)) {
        let v = x[m * quads + i];
        let y = v * weight[i];
        squares += dot(v, v);
        products += vec2(dot(y, alpha[h * quads + i]), dot(y, beta[h * quads + i]));
    }
    let inverse = 1.0 / sqrt(group_sum(g, squares) / f32(args.dim) + args.eps);
    let decay = group_sum(g, products.x) * inverse + bias[h];
    let strength = group_sum(g, products.y) * inverse;
    if (g.lane == 0u) {
        let at = m * 2u * u32(args.heads) + h;
        out[at] = rate[h] * (max(decay, 0.0) + log(1.0 + exp(-abs(decay))));
        out[at + u32(args.heads)] = 1.0 / (1.0 + exp(-strength));
    }
}
