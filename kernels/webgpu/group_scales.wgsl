// Weights with a scale for each GROUP of columns: SETS groups of a block of 128 columns, of PLANES bit pairs each, or one of several
// blocks. Their sums are exact, and their terms are added in the order that the contract states, so that the result has its bits.
const COUNT = u32(COLS / GROUP);  // groups of a row

// The at-th scale.
fn unit_of(at: u32) -> f32 { return unpack2x16float(w_scale[at / 2u])[at % 2u]; }

// The sum of set i of a block, whose planes have these sums.
fn set_sum(sums: vec4<i32>, i: u32) -> i32 {
    var sum = 0;
#repeat p PLANES
    sum += sums[i * u32(PLANES) + p];
#end
    return sum;
}
