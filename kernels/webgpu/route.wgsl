// The experts of each token: logits, then the greatest of them and their softmax.
// Grid of route_logits: [shares of the experts, tokens]. LANES invocations share an expert's row of the router; each adds in the same
// order, so that equal rows have equal logits. The norm is one factor of the whole row.
struct LogitArgs { eps: f32, dim: u32, experts: u32 }
@group(0) @binding(0) var<storage, read> logit_step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> router: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> made: array<f32>;
@group(0) @binding(5) var<uniform> logit_args: LogitArgs;

var<workgroup> part: array<f32, WG>;

@compute @workgroup_size(WG)
fn route_logits(grid: Grid, g: Group) {
    let m = grid.id.y;
    if (m >= u32(logit_step[STEP_TOKENS])) { return; }
    let quads = logit_args.dim / 4u;
    let row = m * quads;
    let e = grid.id.x * u32(WG / LANES) + g.lane / u32(LANES);
    let expert_row = min(e, logit_args.experts - 1u) * quads;
    var squares = 0.0;
    var sum = 0.0;
    for (var k = g.lane; k < quads; k += u32(WG)) { squares += dot(x[row + k], x[row + k]); }
    for (var k = g.lane % u32(LANES); k < quads; k += u32(LANES)) { sum += dot(x[row + k] * weight[k], router[expert_row + k]); }
    part[g.lane] = sum;
    let inverse = 1.0 / sqrt(group_sum(g, squares) / f32(logit_args.dim) + logit_args.eps);  // its barriers publish `part`
    if (g.lane % u32(LANES) == 0u && e < logit_args.experts) {
        for (var i = 1u; i < u32(LANES); i++) { sum += part[g.lane + i]; }
        made[m * logit_args.experts + e] = sum * inverse;
    }
}

// A workgroup a token. Each round finds the best expert behind the one that was found before.
struct Args { top: u32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> shares: array<f32>;
@group(0) @binding(4) var<uniform> args: Args;

#include "best.wgsl"

// The place of an expert among all. What is not a number comes before all numbers, so that a share tells of it.
fn rank(logit: f32, expert: u32) -> vec2<u32> { return vec2(select(float_key(logit), 0xFFFFFFFFu, no_number(logit)), expert); }

// e^z; NaN of what is not a number, which the built-in function need not keep.
fn power_of(z: f32) -> f32 {
    if (no_number(z)) { return z; }
    return exp(z);
}

@compute @workgroup_size(WG)
fn route_top(grid: Grid, g: Group) {
    let m = grid.id.x;
    if (m >= u32(step[STEP_TOKENS])) { return; }
    let row = m * u32(EXPERTS);
    var last = vec2(0u);
    var first = 0.0;
    var total = 0.0;
    for (var j = 0u; j < args.top; j++) {
        var mine = NONE;
        for (var e = g.lane; e < u32(EXPERTS); e += u32(WG)) {
            let found = rank(logits[row + e], e);
            if ((j == 0u || before(last, found)) && before(found, mine)) { mine = found; }
        }
        last = group_best(g, mine);
        let logit = logits[row + last.y];
        if (j == 0u) { first = logit; }
        let power = power_of(logit - first);
        total += power;
        if (g.lane == 0u) {
            ids[m * args.top + j] = last.y;
            shares[m * args.top + j] = power;
        }
    }
    if (g.lane == 0u) {
        for (var j = 0u; j < args.top; j++) { shares[m * args.top + j] /= total; }
    }
}
