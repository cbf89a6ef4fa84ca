// out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that are bound: `rows` of them, from row
// `first` of `total`. Weights are codes w + 1 in two bits. Sixteen bytes of codes, a vec4, hold 64 weights: bytes of one plane
// (bit pair) are 16 neighbours of K, and the vec4s 2b and 2b + 1 are the halves of the 128 weights of block b.
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

fn store(m: u32, n: u32, sum: i32) {
    let value = f32(sum) * (scale[m] * w_scale[args.first + n]);
    let at = m * args.total + args.first + n;
#if ADD
    out[at] += value;
#else
    out[at] = value;
#endif
}

#if GEMV
// For a few tokens: LANES invocations share a row of W, each with TOKENS sums.
const ROWS = u32(WG / LANES);
var<workgroup> parts: array<array<i32, WG>, TOKENS>;

@compute @workgroup_size(WG)
fn ternary_gemv(g: Group) {
    let tokens = u32(step[0]);
    let vecs = (args.cols + 127u) / 128u * 2u;
    let n = (g.id.y * g.count.x + g.id.x) * ROWS + g.lane / u32(LANES);
    let row = min(n, args.rows - 1u) * vecs;
    var sums: array<i32, TOKENS>;
    for (var v = g.lane % u32(LANES); v < vecs; v += u32(LANES)) {
        let word = codes[row + v];
        for (var plane = 0u; plane < 4u; plane++) {
            let w = weights_of(word, plane);
            for (var t = 0u; t < u32(TOKENS); t++) { sums[t] += dot16(w, load_x(min(t, tokens - 1u), v, plane)); }
        }
    }
    for (var t = 0; t < TOKENS; t++) { parts[t][g.lane] = sums[t]; }
    workgroupBarrier();
    for (var item = g.lane; item < ROWS * u32(TOKENS); item += u32(WG)) {
        let t = item / ROWS;
        let to = (g.id.y * g.count.x + g.id.x) * ROWS + item % ROWS;
        if (t < tokens && to < args.rows) {
            var sum = 0;
            for (var i = 0u; i < u32(LANES); i++) { sum += parts[t][item % ROWS * u32(LANES) + i]; }
            store(t, to, sum);
        }
    }
}
#else
// For many tokens: a tile of TILE_M tokens and TILE_N rows a workgroup of 256, 64 of K at a time through workgroup memory, where
// weights lie expanded to bytes. The next 64 are fetched while these are multiplied.
const TILE_M = 64u;
const TILE_N = 128u;
var<workgroup> x_tile: array<array<vec4<u32>, TILE_M>, 4>;
var<workgroup> w_tile: array<array<vec4<u32>, TILE_N>, 4>;

struct Tokens { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }

fn products(w: vec4<u32>, x: Tokens) -> vec4<i32> { return vec4(dot16(w, x.a), dot16(w, x.b), dot16(w, x.c), dot16(w, x.d)); }

fn store_row(n: u32, m: u32, tokens: u32, sums: vec4<i32>) {
    if (n >= args.rows) { return; }
    if (m < tokens) { store(m, n, sums.x); }
    if (m + 16u < tokens) { store(m + 16u, n, sums.y); }
    if (m + 32u < tokens) { store(m + 32u, n, sums.z); }
    if (m + 48u < tokens) { store(m + 48u, n, sums.w); }
}

@compute @workgroup_size(WG)
fn ternary_gemm(g: Group) {
    let tokens = u32(step[0]);
    let m0 = g.id.y * TILE_M;
    let n0 = g.id.x * TILE_N;
    if (m0 >= tokens) { return; }
    let vecs = (args.cols + 127u) / 128u * 2u;
    // What this invocation fetches: one plane of a token, and half of the planes of a row.
    let x_token = min(m0 + g.lane / 4u, tokens - 1u);
    let x_plane = g.lane % 4u;
    let w_row = g.lane % TILE_N;
    let w_plane = 2u * (g.lane / TILE_N);
    let row = min(n0 + w_row, args.rows - 1u) * vecs;
    var next_x = load_x(x_token, 0u, x_plane);
    var next_w = codes[row];
    let my_n = g.lane % 16u;  // rows my_n + 16 i, tokens my_m + 16 j
    let my_m = g.lane / 16u;
    // Named, not an array: what a driver does not unroll it would index in memory.
    var sum0 = vec4(0);
    var sum1 = vec4(0);
    var sum2 = vec4(0);
    var sum3 = vec4(0);
    var sum4 = vec4(0);
    var sum5 = vec4(0);
    var sum6 = vec4(0);
    var sum7 = vec4(0);
    for (var v = 0u; v < vecs; v++) {
        workgroupBarrier();
        x_tile[x_plane][g.lane / 4u] = next_x;
        w_tile[w_plane][w_row] = weights_of(next_w, w_plane);
        w_tile[w_plane + 1u][w_row] = weights_of(next_w, w_plane + 1u);
        workgroupBarrier();
        if (v + 1u < vecs) {
            next_x = load_x(x_token, v + 1u, x_plane);
            next_w = codes[row + v + 1u];
        }
        for (var plane = 0u; plane < 4u; plane++) {
            let x_of = Tokens(
                x_tile[plane][my_m], x_tile[plane][my_m + 16u], x_tile[plane][my_m + 32u], x_tile[plane][my_m + 48u]
            );
            sum0 += products(w_tile[plane][my_n], x_of);
            sum1 += products(w_tile[plane][my_n + 16u], x_of);
            sum2 += products(w_tile[plane][my_n + 32u], x_of);
            sum3 += products(w_tile[plane][my_n + 48u], x_of);
            sum4 += products(w_tile[plane][my_n + 64u], x_of);
            sum5 += products(w_tile[plane][my_n + 80u], x_of);
            sum6 += products(w_tile[plane][my_n + 96u], x_of);
            sum7 += products(w_tile[plane][my_n + 112u], x_of);
        }
    }
    let n = n0 + my_n;
    let m = m0 + my_m;
    store_row(n, m, tokens, sum0);
    store_row(n + 16u, m, tokens, sum1);
    store_row(n + 32u, m, tokens, sum2);
    store_row(n + 48u, m, tokens, sum3);
    store_row(n + 64u, m, tokens, sum4);
    store_row(n + 80u, m, tokens, sum5);
    store_row(n + 96u, m, tokens, sum6);
    store_row(n + 112u, m, tokens, sum7);
}
#endif
