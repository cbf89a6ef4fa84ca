// Host memory for a buffer of a test's driver, as guard.py gives it: the buffer ends where an inaccessible page begins, so that a kernel that
// reads or writes past its end ends the process. Another inaccessible page is less than a page before it, and the bytes between hold poison.
#ifndef BITNET_GUARDED_H
#define BITNET_GUARDED_H
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static inline size_t guarded_page(void) { return (size_t)sysconf(_SC_PAGESIZE); }

static inline char *guarded_page_of(const char *at) { return (char *)((size_t)at / guarded_page() * guarded_page()); }

static inline void guarded_protect(char *begin, size_t size, int access) {
    size_t page = guarded_page();
    if (mprotect(guarded_page_of(begin) - page, page, access) || mprotect(begin + size, page, access)) abort();
}

// Bytes to allocate for a buffer of `size` bytes.
static inline size_t guarded_room(size_t size) { return (size + guarded_page() - 1) / guarded_page() * guarded_page() + 3 * guarded_page(); }

// Where the buffer begins in memory of guarded_room(size) bytes.
static inline void *guarded_begin(void *room, size_t size) {
    size_t page = guarded_page();
    char *first = guarded_page_of((char *)room + page - 1) + page, *begin = first + (page - size % page) % page;
    memset(first, 0xFF, (size_t)(begin - first));
    guarded_protect(begin, size, PROT_NONE);
    return begin;
}

// To be called before the room is freed.
static inline void guarded_end(void *begin, size_t size) { guarded_protect(begin, size, PROT_READ | PROT_WRITE); }
#endif
