// The ternary product of a few tokens: out[m, n] = f32(sum of x[m, k] w[n, k]) * (scale[m] * w_scale[n]), for the weight rows that
// are bound: `rows` of them, from row `first` of `total`. Weights are codes w + 1 in two bits. Sixteen bytes of codes, a vec4,
// hold 64 weights: bytes of one plane (bit pair) are 16 neighbours of K, and the vec4s 2b and 2b + 1 are the halves of the 128
// weights of block b.
// LANES invocations share EACH rows of W, each with TOKENS sums of every one. LANES units of UNIT vec4s of a row, and the activations
// that go with them in workgroup memory, are multiplied at a time, while the next are fetched: LOADS times 16 activations an invocation.
// GROUP: a scale for each GROUP of columns, SETS of them in a unit. The terms of LANES units go through workgroup memory, in rows of
// TERM_PITCH, where each result is added up by one invocation: OUTS results an invocation.
struct Args { cols: u32, rows: u32, first: u32, total: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if ALIGNED
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
#if GROUP
@group(0) @binding(4) var<storage, read> w_scale: array<u32>;  // two f16 each
#include "group_scales.wgsl"
#else
@group(0) @binding(4) var<storage, read> w_scale: array<f32>;
#endif
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

const STRIDE = u32(LANES);
const SLOTS = u32(WG) / STRIDE;
const ROWS = SLOTS * u32(EACH);
const SPAN = STRIDE * u32(UNIT);  // vec4s of a row at a time
const UNITS = 4u * SPAN;          // 16 activations each, of a token at a time
var<workgroup> x_part: array<array<vec4<u32>, UNITS>, TOKENS>;
#if GROUP
var<workgroup> terms: array<f32, ROWS * u32(TOKENS * TERM_PITCH)>;
#else
var<workgroup> parts: array<array<i32, WG>, TOKENS>;
#endif

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

// Where the activations of a plane that meet the h-th vec4 of an invocation's unit lie: what is stored together falls into different banks.
fn x_place(plane: u32, h: u32, lane: u32) -> u32 { return (plane * u32(UNIT) + h) * STRIDE + (lane ^ (plane * 2u + h % 2u)); }

// The same for the at-th 16 activations of a token; in memory they are blocks of four planes of two halves.
fn x_place_of(at: u32) -> u32 {
    let v = at / 8u * 2u + at % 2u;
    return x_place(at / 2u % 4u, v % u32(UNIT), v / u32(UNIT));
}

fn store(m: u32, n: u32, value: f32) {
    let to = m * args.total + args.first + n;
#if ADD
    out[to] += value;
#else
    out[to] = value;
#endif
}

@compute @workgroup_size(WG)
fn ternary_gemv(
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
    @builtin(local_invocation_index) item: u32,
) {
    let tokens = u32(step[STEP_TOKENS]);
    let t0 = id.z * u32(TOKENS);
    if (t0 >= tokens) { return; }
    let vecs = (args.cols + 127u) / 128u * 2u;
    let lane = item % STRIDE;
    let slot = item / STRIDE;
    let n0 = (id.y * count.x + id.x) * ROWS;
    var sums: array<array<i32, TOKENS * SETS>, EACH>;
    var next_x: array<vec4<u32>, LOADS>;
    var next_w: array<vec4<u32>, EACH * UNIT>;
#if GROUP
    var next_scale: array<f32, EACH * SETS>;
    var totals: array<f32, OUTS>;
#endif
    for (var start = 0u; start < vecs + SPAN; start += SPAN) {
        let now = next_w;
#if GROUP
        let units = next_scale;
#endif
        if (start > 0u) {
            workgroupBarrier();
#repeat i LOADS
            let at = item + i * u32(WG);
            if (at < u32(TOKENS) * UNITS) { x_part[at / UNITS][x_place_of(at % UNITS)] = next_x[i]; }
#end
#if GROUP
            if (start > SPAN) {
#repeat o OUTS
                totals[o] = with_terms(totals[o], item + o * u32(WG));
#end
            }
#endif
            workgroupBarrier();
        }
        if (start < vecs) {
#repeat e EACH
            let n = min(n0 + e * SLOTS + slot, args.rows - 1u);
            let unit = start / u32(UNIT) + lane;
#repeat h UNIT
            next_w[e * u32(UNIT) + h] = codes[n * vecs + min(unit * u32(UNIT) + h, vecs - 1u)];
#end
#if GROUP
#repeat i SETS
            next_scale[e * u32(SETS) + i] = unit_of((args.first + n) * COUNT + min(unit * u32(SETS) + i, COUNT - 1u));
#end
#endif
#end
#repeat i LOADS
            let at = item + i * u32(WG);
            next_x[i] = load_x(min(t0 + at / UNITS, tokens - 1u), start * 4u + at % UNITS);
#end
        }
        // Beyond the end of a row, its last codes meet zeros.
        if (start > 0u) {
#repeat h UNIT
            var signs: array<vec4<u32>, EACH>;
#repeat e EACH
            signs[e] = signed_codes(now[e * u32(UNIT) + h]);
#end
#repeat plane 4
            var w: array<vec4<u32>, EACH>;
#repeat e EACH
            w[e] = plane_of(signs[e], plane);
#end
#repeat t TOKENS
            let q = x_part[t][x_place(plane, h, lane)];
#repeat e EACH
            sums[e][t * u32(SETS) + plane * u32(SETS) / 4u] += dot16(w[e], q);
#end
#end
#end
#end
#if GROUP
#repeat e EACH
#repeat t TOKENS
#repeat i SETS
            let at = (t * ROWS + e * SLOTS + slot) * u32(TERM_PITCH) + lane * u32(SETS) + i;
            terms[at] = rounded(f32(sums[e][t * u32(SETS) + i]) * units[e * u32(SETS) + i], args.rows >> 31u);
            sums[e][t * u32(SETS) + i] = 0;
#end
#end
#end
#endif
        }
    }
#if GROUP
    workgroupBarrier();
#repeat o OUTS
    let at = item + o * u32(WG);
    let m = t0 + at / ROWS;
    let n = n0 + at % ROWS;
    if (at < ROWS * u32(TOKENS) && m < tokens && n < args.rows) {
        let sum = from_zero(with_terms(totals[o], at));
        store(m, n, rounded(sum * UNFOLD * scale[m], args.rows >> 31u));
    }
#end
#else
#repeat e EACH
    workgroupBarrier();
#repeat t TOKENS
    parts[t][lane * SLOTS + slot] = sums[e][t];
#end
    workgroupBarrier();
    for (var at = item; at < SLOTS * u32(TOKENS); at += u32(WG)) {
        let m = t0 + at / SLOTS;
        let n = n0 + e * SLOTS + at % SLOTS;
        if (m < tokens && n < args.rows) {
            var sum = 0;
#repeat i LANES
            sum += parts[at / SLOTS][i * SLOTS + at % SLOTS];
#end
            store(m, n, scaled(sum >> 6u, scale[m], w_scale[args.first + n], args.rows >> 31u));
        }
    }
#end
#endif
}
#if GROUP

// The terms of LANES units, added to a result in their order. Those beyond a row's groups are of activations that are 0.
fn with_terms(before: f32, at: u32) -> f32 {
    var sum = before;
    let from_term = min(at, ROWS * u32(TOKENS) - 1u) * u32(TERM_PITCH);
#repeat i LANES
#repeat j SETS
    sum = rounded(sum + terms[from_term + i * u32(SETS) + j], args.rows >> 31u);
#end
#end
    return sum;
}
#endif
