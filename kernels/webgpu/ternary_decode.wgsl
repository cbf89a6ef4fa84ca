// A ternary product of one token whose activations are quantised here: RMSNorm (where NORM), absmax int8, then the product as in
// ternary_matmul. Every workgroup quantises the row for itself, which costs less than a launch. LANES invocations share a row of
// W. MERGE: x is the SPLITS parts of attention's heads of 4 * HEAD_QUADS, as attention leaves them.
// HELD: quads of x that an invocation quantises. EARLY: vec4s of a row that it asks for before the norm.
// GLU: rows n and n + N / 2 are a gate and its up; out[n] is the gate's activation times up.
struct Args { rows: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> w_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

const QUADS = u32(COLS / 4);
const VECS = u32((COLS + 127) / 128 * 2);
const PLANE = VECS + 2u;                        // stride of a plane in workgroup memory, which keeps the planes in different banks
const ROWS = u32(WG / LANES);
const STRIDE = u32(LANES);
// Planes one after the other, so that neighbouring invocations read neighbouring words.
var<workgroup> quants: array<vec4<u32>, 4u * PLANE>;
var<workgroup> parts: array<array<i32, WG>, 2>;

#if MERGE
const PART = u32(HEAD_QUADS + 1);
var<workgroup> factors: array<f32, QUADS / u32(HEAD_QUADS) * u32(SPLITS)>;

// Weight of each part of a head's attention: its share of the sum of weights, relative to the greatest maximum.
fn find_factors(g: Group) {
    for (var i = g.lane; i < QUADS / u32(HEAD_QUADS) * u32(SPLITS); i += u32(WG)) {
        let first = i / u32(SPLITS) * u32(SPLITS);
        var largest = LOWEST;
#repeat s SPLITS
        largest = max(largest, x[(first + s) * PART + u32(HEAD_QUADS)].x);
#end
        var total = 0.0;
#repeat s SPLITS
        let part = x[(first + s) * PART + u32(HEAD_QUADS)];
        total += exp(part.x - largest) * part.y;
#end
        factors[i] = exp(x[i * PART + u32(HEAD_QUADS)].x - largest) / total;
    }
    workgroupBarrier();
}

fn input(i: u32) -> vec4<f32> {
    let first = i / u32(HEAD_QUADS) * u32(SPLITS);
    var sum = vec4(0.0);
#repeat s SPLITS
    sum += factors[first + s] * x[(first + s) * PART + i % u32(HEAD_QUADS)];
#end
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

// Stores the bytes of activations 4 i … 4 i + 3. Sixteen activations are half h % 2 of plane h / 2 % 4 of block h / 8.
fn keep(i: u32, word: u32) {
    let h = i / 4u;
    quants[(h / 2u % 4u) * PLANE + 2u * (h / 8u) + h % 2u][i % 4u] = word;
}

// The products of the codes of vec4 v of a row, and (GLU) of its up, with the activations. Codes are weights + 1.
fn products(word: vec4<u32>, word_up: vec4<u32>, v: u32) -> vec2<i32> {
    var sums = vec2(0);
#repeat plane 4
    let q = quants[plane * PLANE + v];
    let shift = vec4(6u - 2u * plane);
    sums.x += dot16((word >> shift) & vec4(0x03030303u), q);
#if GLU
    sums.y += dot16((word_up >> shift) & vec4(0x03030303u), q);
#endif
#end
    return sums;
}

@compute @workgroup_size(WG)
fn ternary_decode(g: Group) {
    let lane = g.lane % STRIDE;
    let slot = g.lane / STRIDE;
    let n0 = (g.id.y * g.count.x + g.id.x) * ROWS;
    let row = min(n0 + slot, args.rows - 1u) * VECS;
    let up = row + args.rows * VECS;
    var early: array<vec4<u32>, EARLY>;
    var early_up: array<vec4<u32>, EARLY>;
#repeat j EARLY
    let v = min(lane + j * STRIDE, VECS - 1u);
    early[j] = codes[row + v];
#if GLU
    early_up[j] = codes[up + v];
#endif
#end

    // This invocation's result, if it finishes a row.
    let to = min(n0 + g.lane, args.rows - 1u);
    let unit = w_scale[to];
#if GLU
    let unit_up = w_scale[to + args.rows];
#endif
#if ADD
    let before = out[to];
#endif

    find_factors(g);
    var held: array<vec4<f32>, HELD>;
    var found = vec2(0.0);
#repeat j HELD
    let i = g.lane + j * u32(WG);
    let near = min(i, QUADS - 1u);
    let value = input(near);
    held[j] = weighted(value, near);
    // A repeated quad is not squared twice.
    found = vec2(found.x + select(0.0, dot(value, value), i < QUADS), max(found.y, magnitude(held[j])));
#end
    found = group_sum_max(g, found);
#if NORM
    let inverse = 1.0 / sqrt(found.x / f32(COLS) + args.eps);
#else
    let inverse = 1.0;
#endif
    let largest = max(found.y * inverse, QUANT_FLOOR);
    let factor = inverse * quant_factor(largest);
    var sum_of_x = 0;
#repeat j HELD
    let i = g.lane + j * u32(WG);
    if (i < QUADS) {
        let word = quantised(held[j] * factor);
        sum_of_x += dot4(word, 0x01010101u);
        keep(i, word);
    }
#end
    for (var i = QUADS + g.lane; i < 16u * VECS; i += u32(WG)) { keep(i, 0u); }
    // The sum that the codes' offset adds: below 2^24, as are its parts, so exact. Its barriers publish the bytes.
    let extra = i32(group_sum(g, f32(sum_of_x)));

    var sums = vec2(0);
#repeat j EARLY
    if (lane + j * STRIDE < VECS) { sums += products(early[j], early_up[j], lane + j * STRIDE); }
#end
    for (var v = lane + u32(EARLY) * STRIDE; v < VECS; v += STRIDE) {
#if GLU
        sums += products(codes[row + v], codes[up + v], v);
#else
        sums += products(codes[row + v], vec4(0u), v);
#endif
    }
    parts[0][lane * ROWS + slot] = sums.x;
#if GLU
    parts[1][lane * ROWS + slot] = sums.y;
#endif
    workgroupBarrier();
    if (g.lane < ROWS && n0 + g.lane < args.rows) {
        let scale = quant_scale(largest);
        let zero = args.rows >> 31u;
        var total = -extra;
#repeat i LANES
        total += parts[0][i * ROWS + g.lane];
#end
        let value = scaled(total, scale, unit, zero);
#if GLU
        var total_up = -extra;
#repeat i LANES
        total_up += parts[1][i * ROWS + g.lane];
#end
        out[to] = activation(vec4(value)).x * scaled(total_up, scale, unit_up, zero);
#else
#if ADD
        out[to] = before + value;
#else
        out[to] = value;
#endif
#endif
    }
}
