// Products of rows with the matrices of the experts that they are routed to. A pair is a token and one of its experts.
//
// A workgroup has ROWS rows of one expert's matrices and up to TOKENS pairs of that expert: one, or those of a tile of expert_tiles.
// LANES invocations share a row; each takes blocks of 128 columns, and adds its integer sums to those of the groups of columns, in any
// order, as they are exact. GROUP: columns of a scale; COLS where a matrix has one. EACH: groups of a block; 1 where a group has one or
// more blocks. SCALED: w_scale has two f16 a word, one for each group; otherwise f32, one a row. GROUPED: `chosen` has pairs in the
// order of expert_tiles; otherwise the expert of each.
//
// `per`: pairs that share a row of x and its scale. An expert has `rows` rows of each of `parts` matrices, whose results begin at `first`
// of a pair's `columns`. `begin_row` and `bound_rows`: the rows of all experts' matrices that are bound.
//
// It does not take a Group, for ternary_group.wgsl's reason.
struct Args {
    top: u32, per: u32, experts: u32, rows: u32, parts: u32, first: u32, columns: u32, begin_row: u32, bound_rows: u32,
}
@group(0) @binding(0) var<storage, read> step: array<i32>;
#if WIDE
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
#else
@group(0) @binding(1) var<storage, read> x: array<u32>;
#endif
@group(0) @binding(2) var<storage, read> scale: array<f32>;
@group(0) @binding(3) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> w_scale: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;
@group(0) @binding(6) var<storage, read> chosen: array<u32>;
@group(0) @binding(7) var<storage, read> tiles: array<u32>;
@group(0) @binding(8) var<uniform> args: Args;

const COUNT = u32(COLS / GROUP);          // groups of a row
const BLOCKS = u32(COLS + 127) / 128u;
const ROWS = u32(WG / LANES);
const PLANES = u32(4 / EACH);             // bit pairs of a block that are one group's
var<workgroup> sums: array<atomic<i32>, ROWS * u32(TOKENS) * COUNT>;

#include "ternary_block.wgsl"

// The stacked matrices' row for column n of an expert's result.
fn matrix_row(n: u32, expert: u32) -> u32 { return (n / args.rows * args.experts + expert) * args.rows + n % args.rows; }

// The value of a row's integer sums, from `at` on: the terms of its groups, one after another, or one product.
fn value_of(at: u32, row: u32, unit: f32) -> f32 {
    let zero = args.columns >> 31u;
#if SCALED
    var sum = 0.0;
    for (var s = 0u; s < COUNT; s++) {
        let place = row * COUNT + s;
        let factor = unpack2x16float(w_scale[place / 2u])[place % 2u];
        sum = rounded(sum + rounded(f32(atomicLoad(&sums[at + s])) * factor, zero), zero);
    }
    return rounded(from_zero(sum) * unit, zero);
#else
    return scaled(atomicLoad(&sums[at]), unit, bitcast<f32>(w_scale[row]), zero);
#endif
}

@compute @workgroup_size(WG)
fn expert_matmul(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let slot = lane / u32(LANES);
    let here = id.x * ROWS;
#if GROUPED
    let expert = tiles[3u * id.y];
    let begin = tiles[3u * id.y + 1u];
    let count = tiles[3u * id.y + 2u];
#else
    let expert = chosen[id.y];
    let begin = id.y;
    let count = select(0u, 1u, begin < u32(step[STEP_TOKENS]) * args.top);
#endif
    if (count == 0u) { return; }
    for (var i = lane; i < ROWS * u32(TOKENS) * COUNT; i += u32(WG)) { atomicStore(&sums[i], 0); }
    workgroupBarrier();
    let row = min(matrix_row(min(here + slot, args.rows * args.parts - 1u), expert) - args.begin_row, args.bound_rows - 1u) * (2u * BLOCKS);
    var m: array<u32, TOKENS>;
    var found: array<i32, TOKENS>;
#repeat t TOKENS
    let at = begin + min(t, count - 1u);
#if GROUPED
    m[t] = chosen[at] / args.per;
#else
    m[t] = at / args.per;
#endif
#end
    for (var block = lane % u32(LANES); block < BLOCKS; block += u32(LANES)) {
        let low = codes[row + 2u * block];
        let high = codes[row + 2u * block + 1u];
#repeat plane 4
        let w = weights_of(low, plane);
        let u = weights_of(high, plane);
        let at = 8u * block + 2u * plane;
        let s = (block * 128u + plane / PLANES * (128u / u32(EACH))) / u32(GROUP);
#repeat t TOKENS
        if (t < count) {
            found[t] += dot16(w, load_x(m[t], at)) + dot16(u, load_x(m[t], at + 1u));
            if (COUNT > 1u && (plane + 1u) % PLANES == 0u) {
                if (s < COUNT) { atomicAdd(&sums[(slot * u32(TOKENS) + t) * COUNT + s], found[t]); }
                found[t] = 0;
            }
        }
#end
#end
    }
    if (COUNT == 1u) {
#repeat t TOKENS
        if (t < count) { atomicAdd(&sums[slot * u32(TOKENS) + t], found[t]); }
#end
    }
    workgroupBarrier();
    for (var i = lane; i < ROWS * u32(TOKENS); i += u32(WG)) {
        let t = i % u32(TOKENS);
        let n = here + i / u32(TOKENS);
        if (t >= count) { continue; }
#if GROUPED
        let pair = chosen[begin + t];
#else
        let pair = begin;
#endif
        let row_of_n = matrix_row(n, expert);
        if (row_of_n - args.begin_row < args.bound_rows) {  // not in another part of the weights, nor past the last row
            out[pair * args.columns + args.first + n] = value_of(i * COUNT, row_of_n, scale[pair / args.per]);
        }
    }
}
