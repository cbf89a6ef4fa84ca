// The entry in which a sequence's states are before a pass: the one it read first, then the one that it writes.
int state_source(int seq) { return step_data[(STEP_DONE != 0 ? state_to : state_from) + seq]; }
