// Ends a decode step: keeps the sampled tokens, feeds them (0 for -1) next, lengthens the sequences. One threadgroup.
[[kernel, max_total_threads_per_threadgroup(WG)]] void advance(
    device int *step [[buffer(0)]], constant int &tokens [[buffer(1)]], constant int &seq_len [[buffer(2)]],
    device const int *next [[buffer(3)]], device int *history [[buffer(4)]], PLACE) {
    int rows = STEP_ROWS(step), seqs = STEP_SEQS(step), done = STEP_DONE(step);
    threadgroup_barrier(mem_flags::mem_device);
    for (int r = int(index); r < rows; r += WG) {
        history[done * rows + r] = next[r];
        step[tokens + r] = max(next[r], 0);
    }
    for (int s = int(index); s < seqs; s += WG) step[seq_len + s] = int(uint(step[seq_len + s]) + 1u);
    if (index == 0) STEP_DONE(step) = done + 1;
}
