// The ternary product of many tokens: out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that
// are bound: `rows` of them, from row `first` of `total`. Packing as in ternary_gemv.
// A tile of 16 * EACH_M tokens and 16 * EACH_N rows a workgroup of 256, EACH_M by EACH_N of it an invocation. STEPS times 64 of K
// go through workgroup memory at a time, where weights lie expanded to bytes; the next are fetched while these are multiplied.
// An invocation fetches X_LOADS times 16 activations, and 64 weights, of which it expands PLANES quarters.
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
const UNITS = 4u * u32(STEPS);  // 16 of K each: a plane of a vec4 of codes, at unit 4 * step + plane
var<workgroup> x_tile: array<array<vec4<u32>, TILE_M>, UNITS>;
var<workgroup> w_tile: array<array<vec4<u32>, TILE_N>, UNITS>;

// The 16 activations of token m that one plane of the vec4 v of codes multiplies; zeros past K.
fn load_x(m: u32, v: u32, plane: u32) -> vec4<u32> {
    let at = (v / 2u) * 8u + 2u * plane + (v & 1u);
#if ALIGNED
    return x[m * (args.cols / 16u) + at];
#else
    var words = vec4(0u);
    let width = args.cols / 4u;
#repeat i 4
    if (4u * at + i < width) { words[i] = x[m * width + 4u * at + i]; }
#end
    return words;
#endif
}

// The i-th fetch of x by invocation `lane`: in memory order, the planes of a block of 128, and the halves of each.
fn fetch_x(lane: u32, i: u32, m0: u32, tokens: u32, v: u32) -> vec4<u32> {
    let at = lane + i * u32(WG);
    let unit = at % UNITS;
    return load_x(min(m0 + at / UNITS, tokens - 1u), v + unit % u32(STEPS), unit / u32(STEPS));
}

@compute @workgroup_size(WG)
fn ternary_gemm(g: Group) {
    let tokens = u32(step[STEP_TOKENS]);
    let m0 = g.id.y * TILE_M;
    let n0 = g.id.x * TILE_N;
    if (m0 >= tokens) { return; }
    let vecs = (args.cols + 127u) / 128u * 2u;
    let my_n = g.lane % SIDE;  // rows my_n + 16 i, tokens my_m + 16 j
    let my_m = g.lane / SIDE;
    let w_row = g.lane % TILE_N;  // of which it expands PLANES units from w_unit on
    let w_unit = g.lane / TILE_N * u32(PLANES);
    let from_codes = min(n0 + w_row, args.rows - 1u) * vecs + w_unit / 4u;
    var sums: array<array<i32, EACH_M>, EACH_N>;
    var next_x: array<vec4<u32>, X_LOADS>;
    var next_w = codes[from_codes];
#repeat i X_LOADS
    next_x[i] = fetch_x(g.lane, i, m0, tokens, 0u);
#end
    for (var v = 0u; v < vecs; v += u32(STEPS)) {
        workgroupBarrier();
#repeat i X_LOADS
        let at = g.lane + i * u32(WG);
        if (at < UNITS * TILE_M) { x_tile[at % UNITS % u32(STEPS) * 4u + at % UNITS / u32(STEPS)][at / UNITS] = next_x[i]; }
#end
#repeat i PLANES
        w_tile[w_unit + i][w_row] = weights_of(next_w, (w_unit + i) % 4u);
#end
        workgroupBarrier();
        if (v + u32(STEPS) < vecs) {
            next_w = codes[from_codes + v + u32(STEPS)];
#repeat i X_LOADS
            next_x[i] = fetch_x(g.lane, i, m0, tokens, v + u32(STEPS));
#end
        }
        for (var unit = 0u; unit < UNITS; unit++) {
            var mine: array<vec4<u32>, EACH_M>;
#repeat j EACH_M
            mine[j] = x_tile[unit][my_m + SIDE * j];
#end
#repeat i EACH_N
            let w = w_tile[unit][my_n + SIDE * i];
#repeat j EACH_M
            sums[i][j] += dot16(w, mine[j]);
#end
#end
        }
    }
#repeat i EACH_N
#repeat j EACH_M
    let n = n0 + my_n + SIDE * i;
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
#end
#end
}
