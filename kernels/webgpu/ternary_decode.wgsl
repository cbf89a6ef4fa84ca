// A ternary product of one token whose activations are quantised here: RMSNorm (where NORM), absmax int8, then the product as in
// ternary_matmul. Every workgroup quantises the row for itself, which costs less than a launch. LANES invocations share a row of
// W. MERGE: x is the SPLITS parts of attention's heads of 4 * HEAD_QUADS, as attention leaves them. GLU: rows n and n + N / 2 are a gate and its up; out[n] is the gate's activation times up.
struct Args { rows: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> w_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

const QUADS = u32(COLS / 4);
const VECS = u32((COLS + 127) / 128 * 2);
const ROWS = u32(WG / LANES);
const STRIDE = u32(LANES);
const EARLY = 4u;  // vec4s of a row that an invocation asks for before the norm, which hides their way
// Planes one after the other, so that neighbouring invocations read neighbouring words.
var<workgroup> quants: array<vec4<u32>, 4u * VECS>;
var<workgroup> parts: array<array<i32, WG>, 2>;
var<workgroup> sums_of_x: array<i32, WG>;

#if MERGE
const PART = u32(HEAD_QUADS + 1);
var<workgroup> factors: array<f32, QUADS / u32(HEAD_QUADS) * u32(SPLITS)>;

// What each part of a head's attention counts for: its share of the sum of weights, under the greatest of their maxima.
fn find_factors(g: Group) {
    for (var i = g.lane; i < QUADS / u32(HEAD_QUADS) * u32(SPLITS); i += u32(WG)) {
        let first = i / u32(SPLITS) * u32(SPLITS);
        var largest = LOWEST;
        for (var s = 0u; s < u32(SPLITS); s++) { largest = max(largest, x[(first + s) * PART + u32(HEAD_QUADS)].x); }
        var total = 0.0;
        for (var s = 0u; s < u32(SPLITS); s++) {
            let part = x[(first + s) * PART + u32(HEAD_QUADS)];
            total += exp(part.x - largest) * part.y;
        }
        factors[i] = exp(x[i * PART + u32(HEAD_QUADS)].x - largest) / total;
    }
    workgroupBarrier();
}

fn input(i: u32) -> vec4<f32> {
    let first = i / u32(HEAD_QUADS) * u32(SPLITS);
    var sum = vec4(0.0);
    for (var s = 0u; s < u32(SPLITS); s++) { sum += factors[first + s] * x[(first + s) * PART + i % u32(HEAD_QUADS)]; }
    return sum;
}
#else
fn find_factors(g: Group) {}

fn input(i: u32) -> vec4<f32> { return x[i]; }
#endif

fn weighted(value: vec4<f32>, i: u32) -> vec4<f32> {
#if NORM
    return value * norm[i];
#else
    return value;
#endif
}

struct Early { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }

// Vec4s lane, lane + STRIDE, … of a row; where it has fewer, its last one, which dot_row leaves out.
fn early_codes(row: u32, lane: u32) -> Early {
    let last = VECS - 1u;
    return Early(
        codes[row + min(lane, last)],
        codes[row + min(lane + STRIDE, last)],
        codes[row + min(lane + 2u * STRIDE, last)],
        codes[row + min(lane + 3u * STRIDE, last)],
    );
}

fn dot_row(row: u32, lane: u32, early: Early) -> i32 {
    var sum = dot_codes(early.a, lane) + dot_codes(early.b, lane + STRIDE);
    sum += dot_codes(early.c, lane + 2u * STRIDE) + dot_codes(early.d, lane + 3u * STRIDE);
    for (var v = lane + EARLY * STRIDE; v < VECS; v += STRIDE) { sum += dot_codes(codes[row + v], v); }
    return sum;
}

fn dot_codes(word: vec4<u32>, v: u32) -> i32 {
    var sum = 0;
    if (v >= VECS) { return 0; }
    for (var plane = 0u; plane < 4u; plane++) {
        let pairs = (word >> vec4(6u - 2u * plane)) & vec4(0x03030303u);
        sum += dot16(pairs, quants[plane * VECS + v]);
    }
    return sum;
}

fn result(sum: i32, n: u32, scale: f32) -> f32 { return f32(sum) * (scale * w_scale[n]); }

@compute @workgroup_size(WG)
fn ternary_decode(g: Group) {
    let lane = g.lane % u32(LANES);
    let n = (g.id.y * g.count.x + g.id.x) * ROWS + g.lane / u32(LANES);
    let row = min(n, args.rows - 1u) * VECS;
    let early = early_codes(row, lane);
#if GLU
    let up = row + args.rows * VECS;
    let early_up = early_codes(up, lane);
#endif

    find_factors(g);
    var found = vec2(0.0);
    for (var i = g.lane; i < QUADS; i += u32(WG)) {
        let value = input(i);
        found = vec2(found.x + dot(value, value), max(found.y, magnitude(weighted(value, i))));
    }
    found = group_sum_max(g, found);
#if NORM
    let inverse = 1.0 / sqrt(found.x / f32(COLS) + args.eps);
#else
    let inverse = 1.0;
#endif
    let largest = max(found.y * inverse, QUANT_FLOOR);
    let factor = inverse * quant_factor(largest);
    // The codes are weights + 1, so what they count too often is the sum of x.
    var sum_of_x = 0;
    for (var i = g.lane; i < 4u * VECS; i += u32(WG)) {
        var q = vec4(0u);
        for (var j = 0u; j < 4u; j++) {
            if (4u * i + j < QUADS) { q[j] = quantised(weighted(input(4u * i + j), 4u * i + j) * factor); }
        }
        sum_of_x += dot16(q, vec4(0x01010101u));
        // Sixteen activations are half i % 2 of plane i / 2 % 4 of block i / 8.
        quants[(i / 2u % 4u) * VECS + 2u * (i / 8u) + i % 2u] = q;
    }
    sums_of_x[g.lane] = sum_of_x;
    workgroupBarrier();

    parts[0][g.lane] = dot_row(row, lane, early);
#if GLU
    parts[1][g.lane] = dot_row(up, lane, early_up);
#endif
    workgroupBarrier();
    for (var half = u32(WG) / 2u; half > 0u; half /= 2u) {
        if (g.lane < half) { sums_of_x[g.lane] += sums_of_x[g.lane + half]; }
        workgroupBarrier();
    }
    let to = (g.id.y * g.count.x + g.id.x) * ROWS + g.lane;
    if (g.lane < ROWS && to < args.rows) {
        let scale = quant_scale(largest);
        var total = -sums_of_x[0];
        for (var i = 0u; i < u32(LANES); i++) { total += parts[0][g.lane * u32(LANES) + i]; }
        let value = result(total, to, scale);
#if GLU
        var total_up = -sums_of_x[0];
        for (var i = 0u; i < u32(LANES); i++) { total_up += parts[1][g.lane * u32(LANES) + i]; }
        out[to] = activation(vec4(value)).x * result(total_up, to + args.rows, scale);
#else
#if ADD
        out[to] += value;
#else
        out[to] = value;
#endif
#endif
    }
}
