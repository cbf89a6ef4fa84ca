// A causal convolution of each column, then SiLU. A workgroup WG columns of a token. An invocation computes its token if all taps are
// rows of the step. The first token's also computes those after it that need the state, and then the new state: nothing else touches it.
struct Args { token_seq: i32, seq_begin: i32, state_from: i32, state_to: i32, channels: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read_write> state: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;
#include "states.wgsl"
const BEFORE = TAPS - 1;

// Row `row` of a sequence whose first row of the step is `begin`: in the step, else in entry `source`, if there is one.
fn row_of(row: i32, begin: i32, source: i32, c: i32) -> f32 {
    if (row >= 0) { return x[u32(begin + row) * u32(args.channels) + u32(c)]; }
    if (source < 0) { return 0.0; }
    return state[u32(source * BEFORE + BEFORE + row) * u32(args.channels) + u32(c)];
}

@compute @workgroup_size(WG)
fn causal_conv(grid: Grid, g: Group) {
    let m = i32(grid.id.y);
    let c = i32(grid.id.x * u32(WG) + g.lane);
    if (m >= step[STEP_TOKENS] || c >= args.channels) { return; }
    let sequence = step[args.token_seq + m];
    let begin = step[args.seq_begin + sequence];
    let first = m - begin;
    if (first > 0 && first < BEFORE) { return; }
    let tokens = step[args.seq_begin + sequence + 1] - begin;
    let source = state_source(sequence);
    let last = select(min(tokens, BEFORE) - 1, first, first > 0);
    for (var i = first; i <= last; i++) {
        var sum = 0.0;
        for (var j = 0; j < TAPS; j++) { sum += weight[c * TAPS + j] * row_of(i - BEFORE + j, begin, source, c); }
        out[u32(begin + i) * u32(args.channels) + u32(c)] = sum / (1.0 + exp(-sum));
    }
    if (first > 0) { return; }
    let entry = step[args.state_to + sequence] * BEFORE;
    for (var r = 0; r < BEFORE; r++) {  // a row moves to one before it, so the state may be its own source
        state[u32(entry + r) * u32(args.channels) + u32(c)] = row_of(tokens - BEFORE + r, begin, source, c);
    }
}
