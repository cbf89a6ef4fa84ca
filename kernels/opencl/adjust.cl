// Adjusts the logits of each row that names a slot, by the marks and biases which that holds, and copies those of the others.
// A token's mark is 1 where it is in the prompt, and 2 for each time that it is in the output. WG work-items have EACH logits each.
kernel void adjust(global const int *step, int slots, int repetitions, int presences, int frequencies, global const int *marks,
                   global const float *biases, global const float *logits, global float *out, int n) {
    int r = get_group_id(1);
    if (r >= STEP_ROWS(step)) return;
    int slot = step[slots + r];
    size_t slot_at = (size_t)max(slot - 1, 0) * n;
    float repetition = as_float(step[repetitions + r]), presence = as_float(step[presences + r]);
    float frequency = as_float(step[frequencies + r]);
    for (int i = 0; i < EACH; i++) {
        int v = (get_group_id(0) * EACH + i) * WG + get_local_id(0);
        if (v >= n) return;
        float logit = logits[(size_t)r * n + v];
        if (slot != 0) {
            int mark = marks[slot_at + v];
            if (mark != 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
            if (mark >= 2) logit -= presence + frequency * (float)(mark / 2);
            logit += biases[slot_at + v];
        }
        out[(size_t)r * n + v] = logit;
    }
}

// Counts the chosen tokens in the slots of their rows. One work-group; no two rows have the same slot.
kernel void count_chosen(global const int *step, int slots, global int *marks, global const int *next, int n) {
    for (int r = get_local_id(0); r < STEP_ROWS(step); r += WG) {
        int slot = step[slots + r];
        if (slot != 0 && next[r] >= 0) marks[(size_t)(slot - 1) * n + next[r]] += 2;
    }
}
