// act(gate) * up, RMSNorm (where NORM), absmax int8. A workgroup a token.
struct Args { eps: f32, dim: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> gate_up: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> out: array<u32>;
@group(0) @binding(4) var<storage, read_write> scale: array<f32>;
@group(0) @binding(5) var<storage, read_write> products: array<vec4<f32>>;
@group(0) @binding(6) var<uniform> args: Args;

fn weighted(row: u32, i: u32) -> vec4<f32> {
#if NORM
    return products[row + i] * weight[i];
#else
    return products[row + i];
#endif
}

@compute @workgroup_size(WG)
fn glu_norm_quant(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let quads = u32(args.dim) / 4u;
    let row = m * quads;
    var found = vec2(0.0);
    for (var i = g.lane; i < quads; i += u32(WG)) {
        let product = activation(gate_up[2u * row + i]) * gate_up[2u * row + quads + i];
        products[row + i] = product;  // read again only by this invocation
        found = vec2(found.x + dot(product, product), max(found.y, magnitude(weighted(row, i))));
    }
    found = group_sum_max(g, found);
#if NORM
    let inverse = 1.0 / sqrt(found.x / f32(args.dim) + args.eps);
#else
    let inverse = 1.0;
#endif
    let largest = max(found.y * inverse, QUANT_FLOOR);
    let factor = quant_factor(largest);
    for (var i = g.lane; i < quads; i += u32(WG)) { out[row + i] = quantised(weighted(row, i) * inverse * factor); }
    if (g.lane == 0u) { scale[m] = quant_scale(largest); }
}
