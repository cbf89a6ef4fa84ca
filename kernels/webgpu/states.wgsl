// The entry in which a sequence's states are before a pass: the one it read first, then the one that it writes.
fn state_source(sequence: i32) -> i32 {
    return step[select(args.state_from, args.state_to, step[STEP_DONE] != 0) + sequence];
}
