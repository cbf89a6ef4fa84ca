// WINDOW: positions that a token attends to, its own among them; 0: it attends to all.

// The first position that the last of `length` positions attends to.
__device__ __forceinline__ int window_begin(int length) { return WINDOW ? max(length - WINDOW, 0) : 0; }

// Whether it does not attend to position p, as that is behind its window.
__device__ __forceinline__ bool behind_window(int p, int length) { return WINDOW && p < length - WINDOW; }
