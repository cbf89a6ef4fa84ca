// Absmean ternary quantisation in three launches: partial sums, the scale, the codes. Each kernel's bindings stand in front of it.
struct PartialArgs { n: u32 }
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> part: array<f32>;
@group(0) @binding(2) var<uniform> partial_args: PartialArgs;

@compute @workgroup_size(WG)
fn absmean_partial(grid: Grid, g: Group) {
    var sum = 0.0;
    for (var i = grid.id.x * u32(WG) + g.lane; i < partial_args.n; i += grid.count.x * u32(WG)) { sum += abs(x[i]); }
    sum = group_sum(g, sum);
    if (g.lane == 0u) { part[grid.id.x] = sum; }
}

struct ScaleArgs { partials: u32, n: u32 }
@group(0) @binding(0) var<storage, read> partials: array<f32>;
@group(0) @binding(1) var<storage, read_write> scale: array<f32>;
@group(0) @binding(2) var<uniform> scale_args: ScaleArgs;

@compute @workgroup_size(WG)
fn absmean_scale(grid: Grid, g: Group) {
    var sum = 0.0;
    for (var i = g.lane; i < scale_args.partials; i += u32(WG)) { sum += partials[i]; }
    sum = group_sum(g, sum);
    if (g.lane == 0u) { scale[0] = max(sum / f32(scale_args.n), 1e-5); }
}

struct CodesArgs { n: u32 }
@group(0) @binding(0) var<storage, read> values: array<f32>;
@group(0) @binding(1) var<storage, read> unit: array<f32>;
@group(0) @binding(2) var<storage, read_write> codes: array<u32>;
@group(0) @binding(3) var<uniform> codes_args: CodesArgs;

// Four codes an invocation; those past n are the buffer's padding.
@compute @workgroup_size(WG)
fn ternary_codes(grid: Grid, g: Group) {
    let n = codes_args.n;
    for (var i = grid.id.x * u32(WG) + g.lane; 4u * i < n; i += grid.count.x * u32(WG)) {
        var y = vec4(0.0);
        for (var j = 0u; j < min(4u, n - 4u * i); j++) { y[j] = clamp(values[4u * i + j] / unit[0], -1.0, 1.0); }
        codes[i] = quantised(y);
    }
}
