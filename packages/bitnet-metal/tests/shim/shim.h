// What a library exports that was compiled from one Metal source for the CPU (metal_compile.py beside this file compiles it).
// Several threads may call it; they wait for one another, as threadgroup memory is static.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Results of shim_launch.
enum {
    SHIM_OK = 0,
    SHIM_NO_KERNEL = 1,      // no kernel has this name
    SHIM_ARGUMENTS = 2,      // too few buffers, one too small for its scalar, or threads and groups out of range
    SHIM_OUT_OF_BOUNDS = 3,  // an access outside every buffer, an index past its array, or a write to what is constant
    SHIM_MISALIGNED = 4,     // an access that its type's alignment forbids
    SHIM_BARRIER = 5,        // a barrier or a simdgroup's function that not all of its threads reach
    SHIM_RACE = 6,           // two threads use a byte of threadgroup memory, one writes, no barrier between
    SHIM_ARITHMETIC = 7,     // division by zero, a shift too far, a signed overflow, a float too large for its integer
};

// Runs `kernel` for groups[0] * groups[1] * groups[2] threadgroups of threads[0] * threads[1] * threads[2] threads.
// buffers[i] is what the kernel has at [[buffer(i)]], sizes[i] its length in bytes, scalars (setBytes) included; a null buffer is
// an argument that was not set. threadgroup_bytes: length of [[threadgroup(0)]], 0 where the kernel has none.
// Where the result is not 0, `error` says what happened, with kernel, threadgroup and thread.
int shim_launch(const char *kernel, void **buffers, const uint64_t *sizes, uint32_t count, const uint32_t groups[3],
                const uint32_t threads[3], uint32_t threadgroup_bytes, char *error, uint32_t error_size);

// The number of kernels. names[i] and max_threads[i] (maxTotalThreadsPerThreadgroup) are filled in for the first `capacity`
// of them; both may be null where capacity is 0. The names live as long as the library.
int shim_kernels(const char **names, uint32_t *max_threads, uint32_t capacity);

#ifdef __cplusplus
}
#endif
