// dense_matmul of many rows of x, so that each weight is read once for all of them: a tile of 16 * EACH_M rows of x and 16 * EACH_N
// rows of W a workgroup of 256, EACH_M by EACH_N of it an invocation. 16 of K at a time go through workgroup memory; the next are
// fetched while these are multiplied, X_LOADS and W_LOADS quads an invocation. `rows` weight rows are bound, from row
// `first` of `total`.
struct Args { quads: u32, rows: u32, first: u32, total: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
#if WEIGHT_F16
@group(0) @binding(2) var<storage, read> weight: array<vec2<u32>>;
#else
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
#endif
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<uniform> args: Args;

const SIDE = 16u;
const DEPTH = 4u;  // quads of K at a time
const TILE_R = SIDE * u32(EACH_M);
const TILE_N = SIDE * u32(EACH_N);
// Two unused quads keep neighbours in different banks.
var<workgroup> x_tile: array<array<vec4<f32>, TILE_R + 2u>, DEPTH>;
var<workgroup> w_tile: array<array<vec4<f32>, TILE_N + 2u>, DEPTH>;

#if WEIGHT_F16
fn load_w(at: u32) -> vec4<f32> { return halves(weight[at]); }
#else
fn load_w(at: u32) -> vec4<f32> { return weight[at]; }
#endif

@compute @workgroup_size(WG)
fn dense_gemm(grid: Grid, g: Group) {
    let count = u32(step[STEP_ROWS]);
    let r0 = grid.id.z * TILE_R;
    let n0 = (grid.id.y * grid.count.x + grid.id.x) * TILE_N;
    if (r0 >= count || n0 >= args.rows) { return; }
    let my_n = g.lane % SIDE;
    let my_r = g.lane / SIDE;
    var sums: array<array<f32, EACH_M>, EACH_N>;
    var next_x: array<vec4<f32>, X_LOADS>;
    var next_w: array<vec4<f32>, W_LOADS>;
    for (var start = 0u; start < args.quads + DEPTH; start += DEPTH) {
        if (start > 0u) {
            workgroupBarrier();
#repeat i X_LOADS
            let at = g.lane + i * u32(WG);
            if (at < DEPTH * TILE_R) { x_tile[at % DEPTH][at / DEPTH] = next_x[i]; }
#end
#repeat i W_LOADS
            let at = g.lane + i * u32(WG);
            if (at < DEPTH * TILE_N) { w_tile[at % DEPTH][at / DEPTH] = next_w[i]; }
#end
            workgroupBarrier();
        }
        if (start < args.quads) {
            let quad = start + g.lane % DEPTH;
            let inside = quad < args.quads;
#repeat i X_LOADS
            let r = min(r0 + (g.lane + i * u32(WG)) / DEPTH, count - 1u);
            next_x[i] = select(vec4(0.0), x[r * args.quads + min(quad, args.quads - 1u)], inside);
#end
#repeat i W_LOADS
            let n = min(n0 + (g.lane + i * u32(WG)) / DEPTH, args.rows - 1u);
            next_w[i] = select(vec4(0.0), load_w(n * args.quads + min(quad, args.quads - 1u)), inside);
#end
        }
        if (start > 0u) {
            for (var d = 0u; d < DEPTH; d += 2u) {  // sums of eight products each keep the error down
                var a: array<vec4<f32>, EACH_M>;
                var b: array<vec4<f32>, EACH_M>;
#repeat j EACH_M
                a[j] = x_tile[d][my_r + SIDE * j];
                b[j] = x_tile[d + 1u][my_r + SIDE * j];
#end
#repeat i EACH_N
                let u = w_tile[d][my_n + SIDE * i];
                let v = w_tile[d + 1u][my_n + SIDE * i];
#repeat j EACH_M
                sums[i][j] += fused_dot(v, b[j], fused_dot(u, a[j], 0.0));
#end
#end
            }
        }
    }
#repeat j EACH_M
    let r = r0 + my_r + SIDE * j;
#repeat i EACH_N
    let n = n0 + my_n + SIDE * i;
    if (r < count && n < args.rows) { out[r * args.total + args.first + n] = sums[i][j]; }
#end
#end
}
