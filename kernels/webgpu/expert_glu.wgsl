// act(gate) * up of a token's experts, whose rows stand side by side, with gates and values limited, RMSNorm (where NORM), then absmax
// int8 of each row. Grid: [experts of a token, tokens]. Limits let NaN through.
struct Args { eps: f32, dim: u32, limit: f32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> codes: array<u32>;
@group(0) @binding(4) var<storage, read_write> scale: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

fn at_most(v: vec4<f32>) -> vec4<f32> { return select(v, vec4(args.limit), v > vec4(args.limit)); }

// Quad i of the row whose gates begin at `gates`.
fn product_at(gates: u32, i: u32) -> vec4<f32> {
    return activation(at_most(gate_up[gates + i])) * -at_most(-at_most(gate_up[gates + args.dim / 4u + i]));
}

fn weighted(v: vec4<f32>, i: u32) -> vec4<f32> {
#if NORM
    return v * weight[i];
#else
    return v;
#endif
}

@compute @workgroup_size(WG)
fn expert_glu(grid: Grid, g: Group) {
    if (grid.id.y >= u32(step[STEP_TOKENS])) { return; }
    let quads = args.dim / 4u;
    let row = grid.id.y * grid.count.x + grid.id.x;
    let gates = 2u * row * quads;
    var found = vec2(0.0);
    for (var i = g.lane; i < quads; i += u32(WG)) {
        let v = product_at(gates, i);
        found = vec2(found.x + dot(v, v), max(found.y, magnitude(weighted(v, i))));
    }
    found = group_sum_max(g, found);
#if NORM
    let inverse = 1.0 / sqrt(found.x / f32(args.dim) + args.eps);
#else
    let inverse = 1.0;
#endif
    let largest = max(found.y * inverse, QUANT_FLOOR);
    let factor = quant_factor(largest);
    for (var i = g.lane; i < quads; i += u32(WG)) {
        codes[row * quads + i] = quantised(weighted(product_at(gates, i), i) * inverse * factor);
    }
    if (g.lane == 0u) { scale[row] = quant_scale(largest); }
}
