// The ternary product of a few tokens: out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that
// are bound: `rows` of them, from row `first` of `total`. Weights are codes w + 1 in two bits. Sixteen bytes of codes, a vec4,
// hold 64 weights: bytes of one plane (bit pair) are 16 neighbours of K, and the vec4s 2b and 2b + 1 are the halves of the 128
// weights of block b.
// LANES invocations share EACH rows of W, each with TOKENS sums of every one. LANES vec4s of a row, and the activations that go
// with them in workgroup memory, are multiplied at a time, while the next are fetched: LOADS times 16 activations an invocation.
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

const STRIDE = u32(LANES);
const SLOTS = u32(WG) / STRIDE;
const ROWS = SLOTS * u32(EACH);
const UNITS = 4u * STRIDE;  // 16 activations each, of a token at a time
var<workgroup> x_part: array<array<vec4<u32>, UNITS>, TOKENS>;
var<workgroup> parts: array<array<i32, WG>, TOKENS>;

// Activations 16 at … 16 at + 15 of token m; zeros past K.
fn load_x(m: u32, at: u32) -> vec4<u32> {
#if ALIGNED
    if (at >= args.cols / 16u) { return vec4(0u); }
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

@compute @workgroup_size(WG)
fn ternary_gemv(g: Group) {
    let tokens = u32(step[STEP_TOKENS]);
    let vecs = (args.cols + 127u) / 128u * 2u;
    let lane = g.lane % STRIDE;
    let slot = g.lane / STRIDE;
    let n0 = (g.id.y * g.count.x + g.id.x) * ROWS;
    var sums: array<array<i32, TOKENS>, EACH>;
    var next_x: array<vec4<u32>, LOADS>;
    var next_w: array<vec4<u32>, EACH>;
    for (var start = 0u; start < vecs + STRIDE; start += STRIDE) {
        let now = next_w;
        if (start > 0u) {
            workgroupBarrier();
#repeat i LOADS
            let item = g.lane + i * u32(WG);
            let at = item % UNITS;  // in memory: blocks of four planes of two halves
            if (item < u32(TOKENS) * UNITS) { x_part[item / UNITS][at / 2u % 4u * STRIDE + at / 8u * 2u + at % 2u] = next_x[i]; }
#end
            workgroupBarrier();
        }
        if (start < vecs) {
#repeat e EACH
            next_w[e] = codes[min(n0 + e * SLOTS + slot, args.rows - 1u) * vecs + min(start + lane, vecs - 1u)];
#end
#repeat i LOADS
            let item = g.lane + i * u32(WG);
            next_x[i] = load_x(min(item / UNITS, tokens - 1u), start * 4u + item % UNITS);
#end
        }
        // Beyond the end of a row, its last codes meet zeros.
        if (start > 0u) {
#repeat plane 4
            var w: array<vec4<u32>, EACH>;
#repeat e EACH
            w[e] = weights_of(now[e], plane);
#end
#repeat t TOKENS
            let q = x_part[t][plane * STRIDE + lane];
#repeat e EACH
            sums[e][t] += dot16(w[e], q);
#end
#end
#end
        }
    }
#repeat e EACH
    workgroupBarrier();
#repeat t TOKENS
    parts[t][lane * SLOTS + slot] = sums[e][t];
#end
    workgroupBarrier();
    for (var item = g.lane; item < SLOTS * u32(TOKENS); item += u32(WG)) {
        let t = item / SLOTS;
        let n = n0 + e * SLOTS + item % SLOTS;
        if (t < tokens && n < args.rows) {
            var sum = 0;
#repeat i LANES
            sum += parts[t][i * SLOTS + item % SLOTS];
#end
            let value = scaled(sum, scale[t], w_scale[args.first + n], args.rows >> 31u);
            let to = t * args.total + args.first + n;
#if ADD
            out[to] += value;
#else
            out[to] = value;
#endif
        }
    }
#end
}
