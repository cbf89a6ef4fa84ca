// Adjusts the logits of each row that names a slot, by the marks and biases which that holds, and copies those of the others.
// A token's mark is 1 where it is in the prompt, and 2 for each time that it is in the output. A thread has EACH logits.
[[kernel, max_total_threads_per_threadgroup(WG)]] void adjust(
    device const int *step [[buffer(0)]], constant int &slots [[buffer(1)]], constant int &repetitions [[buffer(2)]],
    constant int &presences [[buffer(3)]], constant int &frequencies [[buffer(4)]], device const int *marks [[buffer(5)]],
    device const float *biases [[buffer(6)]], device const float *logits [[buffer(7)]], device float *out [[buffer(8)]],
    constant int &n [[buffer(9)]], PLACE) {
    int r = int(group.y);
    if (r >= STEP_ROWS(step)) return;
    int slot = step[slots + r];
    ulong slot_at = ulong(max(slot - 1, 0)) * ulong(n), row = ulong(r) * ulong(n);
    float repetition = as_type<float>(step[repetitions + r]), presence = as_type<float>(step[presences + r]);
    float frequency = as_type<float>(step[frequencies + r]);
    for (int i = 0; i < EACH; i++) {
        int v = (int(group.x) * EACH + i) * WG + int(index);
        if (v >= n) return;
        float logit = logits[row + ulong(v)];
        if (slot != 0) {
            int mark = marks[slot_at + ulong(v)];
            if (mark != 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
            if (mark >= 2) logit -= presence + frequency * float(mark / 2);
            logit += biases[slot_at + ulong(v)];
        }
        out[row + ulong(v)] = logit;
    }
}

// Counts the chosen tokens in the slots of their rows. One threadgroup; no two rows have the same slot.
[[kernel, max_total_threads_per_threadgroup(WG)]] void count_chosen(
    device const int *step [[buffer(0)]], constant int &slots [[buffer(1)]], device int *marks [[buffer(2)]],
    device const int *next [[buffer(3)]], constant int &n [[buffer(4)]], PLACE) {
    for (int r = int(index); r < STEP_ROWS(step); r += WG) {
        int slot = step[slots + r];
        if (slot != 0 && next[r] >= 0) marks[ulong(slot - 1) * ulong(n) + ulong(next[r])] += 2;
    }
}
