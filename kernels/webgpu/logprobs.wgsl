// Log-probabilities of each row, of logits as they are: of the chosen token, and of the likeliest ones, as many as the step asks for.
// logprobs_parts finds the likeliest of each share of a row, of EACH * WG logits; logprobs puts what it found together. A part is PITCH
// words: the greatest logit, the sum of e^(z - greatest), then tokens in order, then their logits.
struct PartArgs { n: i32, count: i32 }
@group(0) @binding(0) var<storage, read> part_step: array<i32>;
@group(0) @binding(1) var<storage, read> part_logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> parts: array<i32>;
@group(0) @binding(3) var<uniform> part_args: PartArgs;

const MAX_LOGPROBS = 20;
const PITCH = 42;
#include "best.wgsl"
fn token_of(c: vec2<u32>) -> i32 { return bitcast<i32>(c.y); }
fn bits_of(c: vec2<u32>) -> u32 { return select(~c.x, c.x & 0x7FFFFFFFu, (c.x & 0x80000000u) != 0u); }

@compute @workgroup_size(WG)
fn logprobs_parts(grid: Grid, g: Group) {
    let r = i32(grid.id.y);
    if (r >= part_step[STEP_ROWS]) { return; }
    let begin = i32(grid.id.x) * EACH * WG + i32(g.lane);
    let row = r * part_args.n;
    let k = part_step[STEP_LOGPROBS] - 1;
    let part = (r * part_args.count + i32(grid.id.x)) * PITCH;
    var top = LOWEST;
    var sum = 0.0;
    for (var v = begin; v < min(begin + EACH * WG, part_args.n); v += WG) { top = max(top, part_logits[row + v]); }
    top = group_max(g, top);
    for (var v = begin; v < min(begin + EACH * WG, part_args.n); v += WG) {
        if (part_logits[row + v] >= LOWEST) { sum += exp(part_logits[row + v] - top); }
    }
    sum = group_sum(g, sum);
    if (g.lane == 0u) {
        parts[part] = bitcast<i32>(top);
        parts[part + 1] = bitcast<i32>(sum);
    }
    var last = vec2(0xFFFFFFFFu, 0u);
    for (var j = 0; j < k; j++) {
        var mine = NONE;
        for (var i = 0; i < EACH; i++) {
            let v = begin + i * WG;
            if (v >= part_args.n) { break; }
            let c = vec2(float_key(part_logits[row + v]), u32(v));
            if ((j == 0 || before(last, c)) && before(c, mine)) { mine = c; }
        }
        last = group_best(g, mine);
        if (g.lane == 0u) {
            parts[part + 2 + j] = token_of(last);
            parts[part + 2 + MAX_LOGPROBS + j] = bitcast<i32>(bits_of(last));
        }
    }
}

// A workgroup a row; there are no more parts than invocations.
struct Args { n: i32, count: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> found: array<i32>;
@group(0) @binding(3) var<storage, read> next: array<i32>;
@group(0) @binding(4) var<storage, read_write> history: array<i32>;
@group(0) @binding(5) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn logprobs(grid: Grid, g: Group) {
    let r = i32(grid.id.x);
    if (r >= step[STEP_ROWS]) { return; }
    let t = i32(g.lane);
    let k = step[STEP_LOGPROBS] - 1;
    let part = (r * args.count + min(t, args.count - 1)) * PITCH;
    let top = select(LOWEST, bitcast<f32>(found[part]), t < args.count);
    let greatest = group_max(g, top);
    let rest = log(group_sum(g, select(0.0, bitcast<f32>(found[part + 1]) * exp(top - greatest), t < args.count)));
    let to = (step[STEP_DONE] * step[STEP_ROWS] + r) * (1 + 2 * k);
    if (t == 0) { history[to] = bitcast<i32>(logits[r * args.n + max(next[r], 0)] - greatest - rest); }
    var taken = 0;
    for (var j = 0; j < k; j++) {
        var mine = NONE;
        if (t < args.count && taken < k) {
            let token = found[part + 2 + taken];
            if (token >= 0) { mine = vec2(float_key(bitcast<f32>(found[part + 2 + MAX_LOGPROBS + taken])), u32(token)); }
        }
        let best = group_best(g, mine);
        if (mine.y != NONE.y && mine.y == best.y) { taken++; }
        if (t == 0) {
            history[to + 1 + j] = token_of(best);
            history[to + 1 + k + j] = bitcast<i32>(bitcast<f32>(bits_of(best)) - greatest - rest);
        }
    }
}
