// Ends a decode step: keeps the sampled tokens, feeds them (0 for -1) next, lengthens the sequences. One block.
extern "C" __global__ void advance(int *step, int tokens, int seq_len, const int *next, int *history) {
    wait_for_before();
    int rows = STEP_ROWS(step), seqs = STEP_SEQS(step), done = STEP_DONE(step);
    __syncthreads();
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        history[done * rows + r] = next[r];
        step[tokens + r] = max(next[r], 0);
    }
    for (int s = threadIdx.x; s < seqs; s += blockDim.x) step[seq_len + s]++;
    if (threadIdx.x == 0) STEP_DONE(step) = done + 1;
}
