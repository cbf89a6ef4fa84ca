// What both products of weights with a scale for each GROUP of columns share. The sums of a group are exact, and their terms are added in
// the order that the contract states, so that the result has its bits. EACH: groups of a block of 128 columns; 1 where a group has
// one or more blocks. PLANES: bit pairs of a block that are one group's. Packing as in ternary_gemv.
// The kernels do not take a Group: a browser's compiler has each of its members differ within a workgroup, and forbids barriers after
// a return that depends on one.
struct Args { rows: u32, first: u32, total: u32 }  // rows of W that are bound, the first of them, and all
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if WIDE
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> w_scale: array<u32>;  // two f16 each
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<uniform> args: Args;

const COUNT = u32(COLS / GROUP);                           // groups of a row
const BLOCKS = u32(GROUP + 127) / 128u;                    // blocks that a group has a part of
const ROW = u32(COLS + 127) / 128u * 2u;                   // vectors of codes of a row

#include "ternary_block.wgsl"

// The term of a group: its sum times the scale of row n's group s.
fn term(sum: i32, n: u32, s: u32) -> f32 {
    let at = (args.first + n) * COUNT + s;
    return rounded(f32(sum) * unpack2x16float(w_scale[at / 2u])[at % 2u], args.rows >> 31u);
}

fn added(a: f32, b: f32) -> f32 { return rounded(a + b, args.rows >> 31u); }

fn store(m: u32, n: u32, sum: f32) {
    let to = m * args.total + args.first + n;
    let value = rounded(from_zero(sum) * scale[m], args.rows >> 31u);
#if ADD
    out[to] += value;
#else
    out[to] = value;
#endif
}
