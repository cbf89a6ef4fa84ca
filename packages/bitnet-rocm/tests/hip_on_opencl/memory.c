// The device's memory, which is OpenCL's shared virtual memory, guarded, and poisoned when it is allocated; and the host's, page-locked.
#include "hip.h"

#include "guarded.h"

typedef struct Stream Stream;
typedef struct Block { struct Block *next; void *address; size_t size; void *room; } Block;  // room: what OpenCL allocated

static Block *blocks, *pinned;  // of the device; of the host

size_t device_memory(void) { return (size_t)setting("HIP_TEST_MEMORY", 1L << 32); }
static size_t used(void) {
    size_t sum = 0;
    for (Block *block = blocks; block; block = block->next) sum += block->size;
    return sum;
}
static int inside(const Block *block, const void *address, size_t size) {
    for (; block; block = block->next) {
        size_t at = (size_t)((const char *)address - (char *)block->address);
        if ((const char *)address >= (char *)block->address && at + size <= block->size) return 1;
    }
    return 0;
}

int on_device(const void *address, size_t size) { return inside(blocks, address, size); }

static void allocate(Block *block) {
    block->room = clSVMAlloc(opencl_context, CL_MEM_READ_WRITE | CL_MEM_SVM_FINE_GRAIN_BUFFER, guarded_room(block->size), 0);
    if (block->room) block->address = guarded_begin(block->room, block->size);
}

EXPORT int hipMalloc(void **address, size_t size) {
    BEGIN_OUTSIDE("hipMalloc")
    Block *block = malloc(sizeof *block);
    *block = (Block){blocks, NULL, size, NULL};
    if (used() + size <= device_memory()) allocate(block);
    if (!block->address) {
        free(block);
        status = OUT_OF_MEMORY;
        goto end;
    }
    memset(block->address, 0xA5, size);
    blocks = block;
    *address = block->address;
    END
}

// Takes a block off its list, once nothing runs that could use it.
static int forget(Block **at, const void *address) {
    clFinish(opencl_queue);
    for (; *at; at = &(*at)->next) {
        if ((*at)->address != address) continue;
        Block *gone = *at;
        *at = gone->next;
        if (gone->room) {
            guarded_end(gone->address, gone->size);
            clSVMFree(opencl_context, gone->room);
        }
        free(gone);
        return OK;
    }
    return INVALID_VALUE;
}

EXPORT int hipFree(void *address) {
    BEGIN_OUTSIDE("hipFree")
    status = forget(&blocks, address);
    END
}

EXPORT int hipHostMalloc(void **address, size_t size, unsigned flags) {
    BEGIN_OUTSIDE("hipHostMalloc")
    if (flags) {
        status = INVALID_VALUE;
        goto end;
    }
    Block *block = malloc(sizeof *block);
    *block = (Block){pinned, malloc(size), size};
    pinned = block;
    *address = block->address;
    END
}

EXPORT int hipHostFree(void *address) {
    BEGIN_OUTSIDE("hipHostFree")
    status = forget(&pinned, address);
    if (!status) free(address);
    END
}

EXPORT int hipMemGetInfo(size_t *available, size_t *total) {
    BEGIN("hipMemGetInfo")
    *total = device_memory();
    *available = *total - used();
    END
}

static int copy(const char *call, void *to, const void *from, size_t size, const void *of_device) {
    BEGIN_OUTSIDE(call)
    if (!on_device(of_device, size)) {
        status = INVALID_VALUE;
        goto end;
    }
    if (inside(pinned, to, size)) {  // over only when the stream comes to it: poison until then
        memset(to, 0xA5, size);
        if (clEnqueueSVMMemcpy(opencl_queue, 0, to, from, size, 0, NULL, NULL)) status = INVALID_VALUE;
        goto end;
    }
    clFinish(opencl_queue);
    memcpy(to, from, size);
    END
}

EXPORT int hipMemcpyHtoDAsync(void *to, const void *from, size_t size, Stream *stream) {
    return copy("hipMemcpyHtoDAsync", to, from, size, to);
}

EXPORT int hipMemcpyDtoHAsync(void *to, const void *from, size_t size, Stream *stream) {
    return copy("hipMemcpyDtoHAsync", to, from, size, from);
}
