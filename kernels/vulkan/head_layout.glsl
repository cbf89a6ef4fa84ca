// The compact head is one buffer: column[COLS], then codes[rows][COLS / 2], then size[rows]. Where the latter two begin:
#define CODES_AT (COLS / 4)
#define SIZES_AT (COLS / 2 + rows * (COLS / 16))

// Words of a step's state, which head_rows clears: for each row of x the greatest key that its winner reaches for certain, and how
// many work-groups of head_choose have ended. For the only row of a filtered step (filter.glsl): whether it is undecided; keys of
// the greatest u, and of the greatest z that rows may have which were not certain to be taken; how many were taken; and how many
// rows of the head there are for each u. Then, of each work-group of head_choose, its result for each row, as a key (0: nothing)
// and a token; and z and chance of each row that was taken.
#define MAX_ROWS 8  // of x
#define BINS 256     // of u, each a step of 1 wide, around and around
#define STATE_ARRIVALS MAX_ROWS
#define STATE_UNDECIDED 9
#define STATE_PEAK 10
#define STATE_BAR 11
#define STATE_TAKEN 12
#define STATE_BINS 16
#define STATE_FOUND (STATE_BINS + BINS)
