// ternary_decode of weights with a scale for each GROUP of columns. LANES invocations share a row of W; each takes a unit at a time: UNIT
// vec4s of codes, which are a block of 128 columns that holds SETS groups, or the blocks of one group. The terms of the groups lie in
// workgroup memory, where one invocation adds those of a row in their order. EARLY: units that an invocation asks for before the norm.
// TERM_PITCH: of a row's terms, odd so that rows lie in different banks.
#include "ternary_input.wgsl"
#include "group_scales.wgsl"
@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> w_scale: array<u32>;  // two f16 each
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

const UNITS = VECS / u32(UNIT);
var<workgroup> terms: array<f32, u32((1 + GLU) * TERM_PITCH) * ROWS>;

// The sums of the four planes of vec4 `place` of the row, which are 64 times too great.
fn plane_sums(word: vec4<u32>, place: u32) -> vec4<i32> {
    let weights = signed_codes(word);
    var sums: vec4<i32>;
#repeat p 4
    sums[p] = dot16(plane_of(weights, p), quants[p * PLANE + place]);
#end
    return sums;
}

// The scales of a unit of row n.
fn scales_of(n: u32, unit: u32) -> vec4<f32> {
    var scales: vec4<f32>;
#repeat i SETS
    scales[i] = unit_of(n * COUNT + min(unit * u32(SETS) + i, COUNT - 1u));
#end
    return scales;
}

// Puts the terms of a unit into slot `at`.
fn keep_terms(at: u32, unit: u32, sums: vec4<i32>, scales: vec4<f32>) {
#repeat i SETS
    let s = unit * u32(SETS) + i;
    if (s < COUNT) { terms[at * u32(TERM_PITCH) + s] = rounded(f32(set_sum(sums, i)) * scales[i], args.rows >> 31u); }
#end
}

fn row_of_slot(at: u32, scale: f32) -> f32 {
    let zero = args.rows >> 31u;
    var sum = 0.0;
    for (var s = 0u; s < COUNT; s++) { sum = rounded(sum + terms[at * u32(TERM_PITCH) + s], zero); }
    return rounded(from_zero(sum) * scale, zero);
}

@compute @workgroup_size(WG)
fn ternary_groups_decode(grid: Grid, g: Group) {
    let lane = g.lane % STRIDE;
    let slot = g.lane / STRIDE;
    let n0 = (grid.id.y * grid.count.x + grid.id.x) * ROWS;
    let n = min(n0 + slot, args.rows - 1u);
    let row = n * VECS;
    let up = row + args.rows * VECS;
    var early: array<vec4<u32>, EARLY * UNIT>;
    var early_up: array<vec4<u32>, EARLY * UNIT>;
    var scales: array<vec4<f32>, EARLY>;
    var scales_up: array<vec4<f32>, EARLY>;
#repeat j EARLY
    let unit = min(lane + j * STRIDE, UNITS - 1u);
#repeat h UNIT
    early[j * u32(UNIT) + h] = codes[row + unit * u32(UNIT) + h];
#if GLU
    early_up[j * u32(UNIT) + h] = codes[up + unit * u32(UNIT) + h];
#endif
#end
    scales[j] = scales_of(n, unit);
#if GLU
    scales_up[j] = scales_of(n + args.rows, unit);
#endif
#end
    let to = min(n0 + g.lane, args.rows - 1u);  // this invocation's result, if it finishes a row
#if ADD
    let before = out[to];
#endif
    let taken = take_x(g);
    workgroupBarrier();
#repeat j EARLY
    let unit = lane + j * STRIDE;
    if (unit < UNITS) {
        var sums = vec4(0);
        var sums_up = vec4(0);
#repeat h UNIT
        sums += plane_sums(early[j * u32(UNIT) + h], h * RUN + unit);
#if GLU
        sums_up += plane_sums(early_up[j * u32(UNIT) + h], h * RUN + unit);
#endif
#end
        keep_terms(slot, unit, sums, scales[j]);
#if GLU
        keep_terms(ROWS + slot, unit, sums_up, scales_up[j]);
#endif
    }
#end
    for (var unit = lane + u32(EARLY) * STRIDE; unit < UNITS; unit += STRIDE) {
        var sums = vec4(0);
        var sums_up = vec4(0);
#repeat h UNIT
        sums += plane_sums(codes[row + unit * u32(UNIT) + h], h * RUN + unit);
#if GLU
        sums_up += plane_sums(codes[up + unit * u32(UNIT) + h], h * RUN + unit);
#endif
#end
        keep_terms(slot, unit, sums, scales_of(n, unit));
#if GLU
        keep_terms(ROWS + slot, unit, sums_up, scales_of(n + args.rows, unit));
#endif
    }
    workgroupBarrier();
    if (g.lane < ROWS && n0 + g.lane < args.rows) {
        let scale = taken.scale * UNFOLD;
        let value = row_of_slot(g.lane, scale);
#if GLU
        out[to] = activation(vec4(value)).x * row_of_slot(ROWS + g.lane, scale);
#else
#if ADD
        out[to] = before + value;
#else
        out[to] = value;
#endif
#endif
    }
}
