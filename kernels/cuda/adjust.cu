// Adjusts the logits of each row that names a slot, and copies those of the others. WG threads have EACH logits each.
#include "adjust.cuh"

extern "C" __global__ void adjust(const int *step, int slots, int repetitions, int presences, int frequencies, const int *marks,
                                  const float *biases, const float *logits, float *out, int n) {
    start_dependents();
    wait_for_before();
    int r = blockIdx.y;
    if (r >= STEP_ROWS(step)) return;
    Adjustment a = row_adjustment(step, {slots, repetitions, presences, frequencies, marks, biases}, r, n);
    for (int v = blockIdx.x * WG + threadIdx.x; v < n; v += gridDim.x * WG) {
        size_t at = (size_t)r * n + v;
        out[at] = adjusted(a, logits[at], v);
    }
}

// Counts the chosen tokens in the slots of their rows. One block; no two rows have the same slot.
extern "C" __global__ void count_chosen(const int *step, int slots, int *marks, const int *next, int n) {
    start_dependents();
    wait_for_before();
    for (int r = threadIdx.x; r < STEP_ROWS(step); r += WG) {
        int slot = step[slots + r];
        if (slot != 0 && next[r] >= 0) marks[(size_t)(slot - 1) * n + next[r]] += 2;
    }
}
