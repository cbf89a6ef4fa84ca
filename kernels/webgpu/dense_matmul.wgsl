// out[r, n] = x[r] . weight[n] with f32 sums, for the weight rows that are bound: `rows` of them, from row `first` of `total`.
// LANES invocations share four weight rows, which TOKENS rows of x share. With NORM, x is one row of the residual stream,
// normed here as norm_rows does.
struct Args { quads: u32, rows: u32, first: u32, total: u32, row: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> norm: array<vec4<f32>>;
#if WIDE
alias Unit = vec4<u32>;  // one read
const UNIT = 2u;         // quads in it
#else
const UNIT = 1u;
#if WEIGHT_F16
alias Unit = vec2<u32>;
#else
alias Unit = vec4<f32>;
#endif
#endif
@group(0) @binding(3) var<storage, read> weight: array<Unit>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

const GROUPS = u32(WG / LANES);
const ROWS = 4u * GROUPS;
var<workgroup> parts: array<f32, 4 * WG>;
#if NORM
var<workgroup> normed: array<vec4<f32>, QUADS>;
#endif

fn load_x(t: u32, i: u32) -> vec4<f32> {
#if NORM
    return normed[i];
#else
    return x[t * args.quads + i];
#endif
}

fn product(w: Unit, t: u32, i: u32) -> f32 {
#if WIDE
    return dot(halves(w.xy), load_x(t, 2u * i)) + dot(halves(w.zw), load_x(t, 2u * i + 1u));
#else
#if WEIGHT_F16
    return dot(halves(w), load_x(t, i));
#else
    return dot(w, load_x(t, i));
#endif
#endif
}

@compute @workgroup_size(WG)
fn dense_matmul(grid: Grid, g: Group) {
    let count = u32(step[STEP_ROWS]);
    let t0 = grid.id.z * u32(TOKENS);
    if (t0 >= count) { return; }
#if NORM
    let from_row = u32(step[args.row]) * args.quads;
    var squares = 0.0;
    for (var i = g.lane; i < args.quads; i += u32(WG)) { squares += dot(x[from_row + i], x[from_row + i]); }
    let inverse = 1.0 / sqrt(group_sum(g, squares) / f32(4u * args.quads) + args.eps);
    for (var i = g.lane; i < args.quads; i += u32(WG)) { normed[i] = x[from_row + i] * inverse * norm[i]; }
    workgroupBarrier();
#endif
    let lane = g.lane % u32(LANES);
    let group = g.lane / u32(LANES);
    let n0 = (grid.id.y * grid.count.x + grid.id.x) * ROWS;
    let units = args.quads / UNIT;
    let last = args.rows - 1u;
    let row0 = min(n0 + group, last) * units;
    let row1 = min(n0 + GROUPS + group, last) * units;
    let row2 = min(n0 + 2u * GROUPS + group, last) * units;
    let row3 = min(n0 + 3u * GROUPS + group, last) * units;
    var sums: array<vec4<f32>, TOKENS>;
    for (var i = lane; i < units; i += u32(LANES)) {
        let w0 = weight[row0 + i];
        let w1 = weight[row1 + i];
        let w2 = weight[row2 + i];
        let w3 = weight[row3 + i];
#repeat t TOKENS
        let m = min(t0 + t, count - 1u);
        sums[t] += vec4(product(w0, m, i), product(w1, m, i), product(w2, m, i), product(w3, m, i));
#end
    }
#repeat t TOKENS
    workgroupBarrier();
    let at = group * u32(LANES) + lane;
    parts[at] = sums[t].x;
    parts[at + u32(WG)] = sums[t].y;
    parts[at + 2u * u32(WG)] = sums[t].z;
    parts[at + 3u * u32(WG)] = sums[t].w;
    workgroupBarrier();
    for (var item = g.lane; item < ROWS; item += u32(WG)) {
        if (n0 + item < args.rows && t0 + t < count) {
            var sum = 0.0;
            for (var i = 0u; i < u32(LANES); i++) { sum += parts[item * u32(LANES) + i]; }
            out[(t0 + t) * args.total + args.first + n0 + item] = sum;
        }
    }
#end
}
