// Adjusts the logits of each row that names a slot, by the marks and biases which that holds, and copies those of the others.
// A token's mark is 1 where it is in the prompt, and 2 for each time that it is in the output. An invocation has EACH logits.
struct Args { slots: i32, repetitions: i32, presences: i32, frequencies: i32, n: i32 }
@group(0) @binding(0) var<storage, read> step: array<i32>;
@group(0) @binding(1) var<storage, read> marks: array<i32>;
@group(0) @binding(2) var<storage, read> biases: array<f32>;
@group(0) @binding(3) var<storage, read> logits: array<f32>;
@group(0) @binding(4) var<storage, read_write> adjusted: array<f32>;
@group(0) @binding(5) var<uniform> args: Args;

@compute @workgroup_size(WG)
fn adjust(grid: Grid, g: Group) {
    let r = i32(grid.id.y);
    if (r >= step[STEP_ROWS]) { return; }
    let slot = step[args.slots + r];
    let slot_at = max(slot - 1, 0) * args.n;
    let repetition = bitcast<f32>(step[args.repetitions + r]);
    let presence = bitcast<f32>(step[args.presences + r]);
    let frequency = bitcast<f32>(step[args.frequencies + r]);
    for (var i = 0; i < EACH; i++) {
        let v = (i32(grid.id.x) * EACH + i) * WG + i32(g.lane);
        if (v >= args.n) { return; }
        var logit = logits[r * args.n + v];
        if (slot != 0) {
            let mark = marks[slot_at + v];
            if (mark != 0) { logit = select(logit * repetition, logit / repetition, logit > 0.0); }
            if (mark >= 2) { logit -= presence + frequency * f32(mark / 2); }
            logit += biases[slot_at + v];
        }
        adjusted[r * args.n + v] = logit;
    }
}

// Counts the chosen tokens in the slots of their rows. One workgroup; no two rows have the same slot.
struct CountArgs { slots: i32, n: i32 }
@group(0) @binding(0) var<storage, read> count_step: array<i32>;
@group(0) @binding(1) var<storage, read_write> counted: array<i32>;
@group(0) @binding(2) var<storage, read> next: array<i32>;
@group(0) @binding(3) var<uniform> count_args: CountArgs;

@compute @workgroup_size(WG)
fn count_chosen(grid: Grid, g: Group) {
    for (var r = i32(g.lane); r < count_step[STEP_ROWS]; r += WG) {
        let slot = count_step[count_args.slots + r];
        if (slot != 0 && next[r] >= 0) { counted[(slot - 1) * count_args.n + next[r]] += 2; }
    }
}
