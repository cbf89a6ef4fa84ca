// Rows of f32, of 4 * QUADS, that a kernel quantises: RMSNorm (where NORM), then absmax int8. A workgroup a row, of which an invocation
// holds HELD quads. MERGE: x is the SPLITS parts of attention's heads of 4 * HEAD_QUADS, as attention leaves them.
#if MERGE
const PART = u32(HEAD_QUADS + 1);
const HEADS = QUADS / u32(HEAD_QUADS);
var<workgroup> factors: array<f32, HEADS * u32(SPLITS)>;

// Weight of each part of a head's attention in row m: its share of the sum of weights, relative to the greatest maximum.
fn find_factors(g: Group, m: u32) {
    let row = m * HEADS * u32(SPLITS);
    for (var i = g.lane; i < HEADS * u32(SPLITS); i += u32(WG)) {
        let first = row + i / u32(SPLITS) * u32(SPLITS);
        var largest = LOWEST;
#repeat s SPLITS
        largest = max(largest, x[(first + s) * PART + u32(HEAD_QUADS)].x);
#end
        var total = 0.0;
#repeat s SPLITS
        let part = x[(first + s) * PART + u32(HEAD_QUADS)];
        total += exp(part.x - largest) * part.y;
#end
        factors[i] = exp(x[(row + i) * PART + u32(HEAD_QUADS)].x - largest) / total;
    }
    workgroupBarrier();
}

// Quad i of row m.
fn input(m: u32, i: u32) -> vec4<f32> {
    let first = i / u32(HEAD_QUADS) * u32(SPLITS);
    let row = m * HEADS * u32(SPLITS);
    var sum = vec4(0.0);
#repeat s SPLITS
    sum += factors[first + s] * x[(row + first + s) * PART + i % u32(HEAD_QUADS)];
#end
    return sum;
}
#else
fn find_factors(g: Group, m: u32) {}

fn input(m: u32, i: u32) -> vec4<f32> { return x[m * QUADS + i]; }
#endif

fn weighted(value: vec4<f32>, i: u32) -> vec4<f32> {
#if NORM
    return value * norm[i];
#else
    return value;
#endif
}

struct Row { scale: f32, sum: i32 }  // the value of a unit of its bytes, and the sum of those of this invocation

// Quantises row m: keep() gets the bytes of each quad.
fn take_row(g: Group, m: u32) -> Row {
    find_factors(g, m);
    var held: array<vec4<f32>, HELD>;
    var found = vec2(0.0);
#repeat j HELD
    let i = g.lane + j * u32(WG);
    let near = min(i, QUADS - 1u);
    let value = input(m, near);
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
        keep(m, i, word);
    }
#end
    return Row(quant_scale(largest), sum_of_x);
}
