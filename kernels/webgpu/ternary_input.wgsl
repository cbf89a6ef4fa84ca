// The row of a product of one token, which every workgroup quantises for itself, as that costs less than a launch. UNIT:
// vec4s of codes that an invocation multiplies one after the other.
// GLU: rows n and n + N / 2 are a gate and its up; out[n] is the gate's activation times up.
struct Args { rows: u32, eps: f32 }
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> norm: array<vec4<f32>>;

const QUADS = u32(COLS / 4);
const VECS = u32((COLS + 127) / 128 * 2);
// The activations that meet vec4 v of codes lie at v / UNIT of run v % UNIT of each plane. Runs and planes lie in different banks, and
// one after the other, so that neighbouring invocations read neighbouring words.
const RUN = VECS / u32(UNIT) + max(2u / u32(UNIT), 1u);
const PLANE = u32(UNIT) * RUN;
const ROWS = u32(WG / LANES);
const STRIDE = u32(LANES);
var<workgroup> quants: array<vec4<u32>, 4u * PLANE>;

#include "row_quant.wgsl"

// Stores the bytes of activations 4 i … 4 i + 3. Sixteen activations are half h % 2 of plane h / 2 % 4 of block h / 8.
fn keep(m: u32, i: u32, word: u32) {
    let h = i / 4u;
    let v = 2u * (h / 8u) + h % 2u;
    quants[(h / 2u % 4u) * PLANE + v % u32(UNIT) * RUN + v / u32(UNIT)][i % 4u] = word;
}

// Quantises the row into workgroup memory; a barrier has to follow.
fn take_x(g: Group) -> Row {
    let row = take_row(g, 0u);
    for (var i = QUADS + g.lane; i < 16u * VECS; i += u32(WG)) { keep(0u, i, 0u); }
    return row;
}
