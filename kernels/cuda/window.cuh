// The first position that the last of `length` positions attends to. WINDOW 0: it attends to all of them.
__device__ __forceinline__ int window_begin(int length) { return WINDOW ? max(length - WINDOW, 0) : 0; }
