// The ternary product of many tokens: out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that
// are bound: `rows` of them, from row `first` of `total`. Packing as in ternary_gemv.
// A tile of TILE_M tokens and TILE_N rows a workgroup of 256, EACH_M by EACH_N of it an invocation, 64 of K at a time through
// workgroup memory, where weights lie expanded to bytes. The next 64 are fetched while these are multiplied.
struct Args { cols: u32, rows: u32, first: u32, total: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if ALIGNED
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> w_scale: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

const SIDE = 16u;  // WG = SIDE * SIDE
const TILE_M = SIDE * u32(EACH_M);
const TILE_N = SIDE * u32(EACH_N);
const X_LOADS = (4u * TILE_M + u32(WG) - 1u) / u32(WG);  // 16 activations each
const W_LOADS = (TILE_N + u32(WG) - 1u) / u32(WG) ;      // 64 weights each
var<workgroup> x_tile: array<array<vec4<u32>, TILE_M>, 4>;
var<workgroup> w_tile: array<array<vec4<u32>, TILE_N>, 4>;

// The 16 activations of token m that one plane of the vec4 v of codes goes with; zeros past K.
fn load_x(m: u32, v: u32, plane: u32) -> vec4<u32> {
    let at = (v / 2u) * 8u + 2u * plane + (v & 1u);
#if ALIGNED
    return x[m * (args.cols / 16u) + at];
#else
    var words = vec4(0u);
    let width = args.cols / 4u;
    for (var i = 0u; i < 4u; i++) {
        if (4u * at + i < width) { words[i] = x[m * width + 4u * at + i]; }
    }
    return words;
#endif
}

@compute @workgroup_size(WG)
fn ternary_gemm(g: Group) {
    let tokens = u32(step[0]);
    let m0 = g.id.y * TILE_M;
    let n0 = g.id.x * TILE_N;
    if (m0 >= tokens) { return; }
    let vecs = (args.cols + 127u) / 128u * 2u;
    // What this invocation fetches: planes of tokens, and two bit pairs of half a row (PAIRS invocations a row).
    let my_n = g.lane % SIDE;  // rows my_n + 16 i, tokens my_m + 16 j
    let my_m = g.lane / SIDE;
    var sums: array<array<i32, EACH_M>, EACH_N>;
    var next_x: array<vec4<u32>, X_LOADS>;
    var next_w: vec4<u32>;
    const SHARE = u32(WG) / TILE_N;      // invocations that expand a row's 64 weights
    const PLANES = 4u / SHARE;           // planes that each of them does
    let w_row = g.lane % TILE_N;
    let w_plane = g.lane / TILE_N * PLANES;
    let row = min(n0 + w_row, args.rows - 1u) * vecs;
    for (var i = 0u; i < X_LOADS; i++) {
        let at = g.lane + i * u32(WG);
        next_x[i] = load_x(min(m0 + at / 4u % TILE_M, tokens - 1u), 0u, at % 4u);
    }
    next_w = codes[row];
    for (var v = 0u; v < vecs; v++) {
        workgroupBarrier();
        for (var i = 0u; i < X_LOADS; i++) {
            let at = g.lane + i * u32(WG);
            if (at < 4u * TILE_M) { x_tile[at % 4u][at / 4u] = next_x[i]; }
        }
        for (var i = 0u; i < PLANES; i++) { w_tile[w_plane + i][w_row] = weights_of(next_w, w_plane + i); }
        workgroupBarrier();
        if (v + 1u < vecs) {
            for (var i = 0u; i < X_LOADS; i++) {
                let at = g.lane + i * u32(WG);
                next_x[i] = load_x(min(m0 + at / 4u % TILE_M, tokens - 1u), v + 1u, at % 4u);
            }
            next_w = codes[row + v + 1u];
        }
        for (var plane = 0u; plane < 4u; plane++) {
            var mine: array<vec4<u32>, EACH_M>;
            for (var j = 0u; j < u32(EACH_M); j++) { mine[j] = x_tile[plane][my_m + SIDE * j]; }
            for (var i = 0u; i < u32(EACH_N); i++) {
                let w = w_tile[plane][my_n + SIDE * i];
                for (var j = 0u; j < u32(EACH_M); j++) { sums[i][j] += dot16(w, mine[j]); }
            }
        }
    }
    for (var i = 0u; i < u32(EACH_N); i++) {
        let n = n0 + my_n + SIDE * i;
        for (var j = 0u; j < u32(EACH_M); j++) {
            let m = m0 + my_m + SIDE * j;
            if (n < args.rows && m < tokens) {
                let value = scaled(sums[i][j], scale[m], w_scale[args.first + n], args.rows >> 31u);
                let at = m * args.total + args.first + n;
#if ADD
                out[at] += value;
#else
                out[at] = value;
#endif
            }
        }
    }
}
