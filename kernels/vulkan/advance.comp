// Ends a decode step: keeps the sampled tokens, feeds them (0 for -1) next, lengthens the sequences. One work-group.
BUFFER(0, , int, step_data);
BUFFER(1, readonly, int, next);
BUFFER(2, writeonly, int, history);
layout(push_constant) uniform Push { int tokens, seq_len; };

KERNEL(advance) {
    int rows = STEP_ROWS, seqs = STEP_SEQS, done = STEP_DONE;
    memoryBarrierBuffer();
    barrier();
    for (int r = LANE; r < rows; r += WG) {
        history[done * rows + r] = next[r];
        step_data[tokens + r] = max(next[r], 0);
    }
    for (int s = LANE; s < seqs; s += WG) step_data[seq_len + s]++;
    if (LANE == 0) STEP_DONE = done + 1;
}
