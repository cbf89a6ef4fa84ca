// What a library's kernels and the shim know of one another.
#pragma once
#include <stdint.h>

// Where a thread is.
struct shim_where {
    uint32_t group[3], groups[3], threads[3], position[3], index, lane, simdgroup, simdgroups, width;
};
struct shim_kernel {
    const char *name;
    void (*run)(void **buffers, const shim_where *where);
    uint32_t max_threads, arguments;
    const uint64_t *least;  // of each buffer: bytes that it must have at least; ~0 where the kernel has no such buffer
};
