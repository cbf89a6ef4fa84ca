// Ends a decode step: keeps the sampled tokens, feeds them (0 for -1) next, lengthens the sequences. One work-group.
kernel void advance(global int *step, int tokens, int seq_len, global const int *next, global int *history) {
    int rows = STEP_ROWS(step), seqs = STEP_SEQS(step), done = STEP_DONE(step);
    barrier(CLK_GLOBAL_MEM_FENCE);
    for (int r = get_local_id(0); r < rows; r += get_local_size(0)) {
        history[done * rows + r] = next[r];
        step[tokens + r] = max(next[r], 0);
    }
    for (int s = get_local_id(0); s < seqs; s += get_local_size(0)) step[seq_len + s]++;
    if (get_local_id(0) == 0) STEP_DONE(step) = done + 1;
}
