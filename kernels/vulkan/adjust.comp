// Adjusts the logits of each row that names a slot, by the marks and biases which that holds, and copies those of the others.
// A token's mark is 1 where it is in the prompt, and 2 for each time that it is in the output.
BUFFER(0, readonly, int, step_data);
#if ENTRY_adjust
layout(constant_id = 1) const int EACH = 8;  // logits of an invocation
BUFFER(1, readonly, int, marks);
BUFFER(2, readonly, float, biases);
BUFFER(3, readonly, float, logits);
BUFFER(4, writeonly, float, adjusted);
layout(push_constant) uniform Push { int slots, repetitions, presences, frequencies, n; };

KERNEL(adjust) {
    uint r = gl_WorkGroupID.y;
    if (int(r) >= STEP_ROWS) return;
    int slot = step_data[slots + r];
    uint slot_at = uint(max(slot - 1, 0)) * uint(n), row = r * uint(n);
    float repetition = intBitsToFloat(step_data[repetitions + r]), presence = intBitsToFloat(step_data[presences + r]);
    float frequency = intBitsToFloat(step_data[frequencies + r]);
    for (int i = 0; i < EACH; i++) {
        uint v = (gl_WorkGroupID.x * EACH + i) * WG + LANE;
        if (v >= n) return;
        float logit = logits[row + v];
        if (slot != 0) {
            int mark = marks[slot_at + v];
            if (mark != 0) logit = logit > 0.0 ? logit / repetition : logit * repetition;
            if (mark >= 2) logit -= presence + frequency * float(mark / 2);
            logit += biases[slot_at + v];
        }
        adjusted[row + v] = logit;
    }
}
#else
BUFFER(1, , int, marks);
BUFFER(2, readonly, int, next);
layout(push_constant) uniform Push { int slots, n; };

// Counts the chosen tokens in the slots of their rows. One work-group; no two rows have the same slot.
KERNEL(count_chosen) {
    for (int r = LANE; r < STEP_ROWS; r += WG) {
        int slot = step_data[slots + r];
        if (slot != 0 && next[r] >= 0) marks[uint(slot - 1) * uint(n) + uint(next[r])] += 2;
    }
}
#endif
