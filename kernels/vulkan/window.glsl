// The first position that the last of `length` positions attends to; WINDOW 0: all of them.
#define WINDOW_BEGIN(length) (WINDOW != 0 ? max(0, (length) - WINDOW) : 0)
