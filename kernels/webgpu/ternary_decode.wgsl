// A ternary product of one token whose activations are quantised here, then the product as in ternary_matmul. LANES invocations share a
// row of W. EARLY: vec4s of a row that one of them asks for before the norm.
#include "ternary_input.wgsl"
@group(0) @binding(2) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> w_scale: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

var<workgroup> parts: array<array<i32, WG>, 2>;

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
fn ternary_decode(grid: Grid, g: Group) {
    let lane = g.lane % STRIDE;
    let slot = g.lane / STRIDE;
    let n0 = (grid.id.y * grid.count.x + grid.id.x) * ROWS;
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

    let taken = take_x(g);
    // The sum that the codes' offset adds: below 2^24, as are its parts, so exact. Its barriers publish the bytes.
    let extra = i32(group_sum(g, f32(taken.sum)));
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
        let zero = args.rows >> 31u;
        var total = -extra;
#repeat i LANES
        total += parts[0][i * ROWS + g.lane];
#end
        let value = scaled(total, taken.scale, unit, zero);
#if GLU
        var total_up = -extra;
#repeat i LANES
        total_up += parts[1][i * ROWS + g.lane];
#end
        out[to] = activation(vec4(value)).x * scaled(total_up, taken.scale, unit_up, zero);
#else
#if ADD
        out[to] = before + value;
#else
        out[to] = value;
#endif
#endif
    }
}
