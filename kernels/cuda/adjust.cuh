// How the logits of a row are adjusted before its token is chosen: by the marks and biases that its slot holds. A token's mark is 1
// where it is in the prompt, and 2 for each time that it is in the output.

struct Adjustment {
    const int *marks;  // null: not at all
    const float *biases;
    float repetition, presence, frequency;
    int last;  // token of the vocabulary
};

struct AdjustmentFields {  // where the step has them, in words; and the slots
    int slots, repetitions, presences, frequencies;
    const int *marks;
    const float *biases;
};

__device__ __forceinline__ Adjustment row_adjustment(const int *step, const AdjustmentFields &at, int r, int vocabulary) {
    int slot = step[at.slots + r];
    if (slot == 0) return {};
    size_t begin = (size_t)(slot - 1) * vocabulary;
    return {at.marks + begin, at.biases + begin, __int_as_float(step[at.repetitions + r]), __int_as_float(step[at.presences + r]),
            __int_as_float(step[at.frequencies + r]), vocabulary - 1};
}

// Tokens past the last are taken as the last. Rounded step by step, so that it is the same number wherever it is compiled.
__device__ __forceinline__ float adjusted(const Adjustment &a, float logit, int v) {
    if (a.marks == nullptr) return logit;
    v = min(v, a.last);
    int mark = a.marks[v];
    if (mark != 0) logit = logit > 0.0f ? __fdiv_rn(logit, a.repetition) : __fmul_rn(logit, a.repetition);
    if (mark >= 2) logit = __fsub_rn(logit, __fadd_rn(a.presence, __fmul_rn(a.frequency, (float)(mark / 2))));
    return __fadd_rn(logit, a.biases[v]);
}
