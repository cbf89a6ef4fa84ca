// Ends a decode step: keeps the sampled tokens, feeds them (0 for -1) next, lengthens the sequences. One workgroup.
struct Args { tokens: i32, seq_len: i32 }
@group(0) @binding(0) var<storage, read_write> step: array<i32>;
@group(0) @binding(1) var<storage, read> next: array<i32>;
@group(0) @binding(2) var<storage, read_write> history: array<i32>;
@group(0) @binding(3) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn advance(grid: Grid, g: Group) {
    let seqs = step[STEP_SEQS];
    let rows = step[STEP_ROWS];
    let done = step[STEP_DONE];
    workgroupBarrier();
    for (var r = i32(g.lane); r < rows; r += WG) {
        history[done * rows + r] = next[r];
        step[args.tokens + r] = max(next[r], 0);
    }
    for (var s = i32(g.lane); s < seqs; s += WG) { step[args.seq_len + s] += 1; }
    if (g.lane == 0u) { step[STEP_DONE] = done + 1; }
}
