#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* MAP_ANONYMOUS, MADV_HUGEPAGE */
#endif
#include "platform.h"

#include <stdlib.h>

#if defined(__wasm__)

#include <string.h>

#define ALIGNMENT ((size_t)64) /* of an array */

void *pages_alloc(size_t bytes) {
    if (bytes > SIZE_MAX - ALIGNMENT) return NULL;
    const size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *pages = aligned_alloc(ALIGNMENT, size);
    return pages ? memset(pages, 0, size) : NULL;
}

void pages_free(void *pages, size_t bytes) {
    (void)bytes;
    free(pages);
}

#else

#define HUGE_PAGE ((size_t)2 << 20)

typedef struct {
    void (*body)(void *);
    void *argument;
} start_t;

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

_Static_assert(sizeof(mutex_t) == sizeof(SRWLOCK) && sizeof(condition_t) == sizeof(CONDITION_VARIABLE), "platform.h");

static SRWLOCK *lock_of(mutex_t *mutex) { return (SRWLOCK *)&mutex->lock; }
static CONDITION_VARIABLE *variable_of(condition_t *condition) { return (CONDITION_VARIABLE *)&condition->variable; }

void mutex_init(mutex_t *mutex) { InitializeSRWLock(lock_of(mutex)); }
void mutex_lock(mutex_t *mutex) { AcquireSRWLockExclusive(lock_of(mutex)); }
void mutex_unlock(mutex_t *mutex) { ReleaseSRWLockExclusive(lock_of(mutex)); }
void condition_init(condition_t *condition) { InitializeConditionVariable(variable_of(condition)); }
void condition_wait(condition_t *condition, mutex_t *mutex) {
    SleepConditionVariableSRW(variable_of(condition), lock_of(mutex), INFINITE, 0);
}
void condition_wake_all(condition_t *condition) { WakeAllConditionVariable(variable_of(condition)); }
process_id_t process_id(void) { return GetCurrentProcessId(); }

int64_t wall_time(void) {
    LARGE_INTEGER count, frequency;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&frequency);
    return (int64_t)((double)count.QuadPart * 1e9 / (double)frequency.QuadPart);
}

int64_t run_time(void) { return wall_time(); } /* the system's own count advances 16 ms at a time, which is too coarse */

static DWORD WINAPI enter(void *raw) {
    start_t start = *(start_t *)raw;
    free(raw);
    start.body(start.argument);
    return 0;
}

bool thread_start(thread_t *thread, void (*body)(void *), void *argument) {
    start_t *start = malloc(sizeof *start);
    if (!start) return false;
    *start = (start_t){body, argument};
    *thread = CreateThread(NULL, 0, enter, start, 0, NULL);
    if (!*thread) free(start);
    return *thread != NULL;
}

void thread_join(thread_t thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}

void *pages_alloc(size_t bytes) { return VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE); }

void pages_free(void *pages, size_t bytes) {
    (void)bytes;
    VirtualFree(pages, 0, MEM_RELEASE);
}

#else

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

void mutex_init(mutex_t *mutex) { pthread_mutex_init(mutex, NULL); }
void mutex_lock(mutex_t *mutex) { pthread_mutex_lock(mutex); }
void mutex_unlock(mutex_t *mutex) { pthread_mutex_unlock(mutex); }
void condition_init(condition_t *condition) { pthread_cond_init(condition, NULL); }
void condition_wait(condition_t *condition, mutex_t *mutex) { pthread_cond_wait(condition, mutex); }
void condition_wake_all(condition_t *condition) { pthread_cond_broadcast(condition); }
process_id_t process_id(void) { return getpid(); }

static int64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}
int64_t wall_time(void) { return nanoseconds(CLOCK_MONOTONIC); }
int64_t run_time(void) { return nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

static void *enter(void *raw) {
    start_t start = *(start_t *)raw;
    free(raw);
    start.body(start.argument);
    return NULL;
}

bool thread_start(thread_t *thread, void (*body)(void *), void *argument) {
    start_t *start = malloc(sizeof *start);
    if (!start) return false;
    *start = (start_t){body, argument};
    /* Signals belong to the threads of the program that loaded us, but a thread's own faults to itself: one that blocks
     * these is ended without its handler being asked. */
    sigset_t others, before;
    sigfillset(&others);
    const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&others, faults[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    bool started = pthread_create(thread, NULL, enter, start) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!started) free(start);
    return started;
}

void thread_join(thread_t thread) { pthread_join(thread, NULL); }

void *pages_alloc(size_t bytes) {
    if (bytes > SIZE_MAX - HUGE_PAGE) return NULL;
    /* Map one huge page more than needed, and unmap what lies outside of the aligned part. */
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t size = (bytes + page - 1) / page * page;
    size_t slack = size >= HUGE_PAGE ? HUGE_PAGE : 0;
    char *raw = mmap(NULL, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return NULL;
    if (!slack) return raw;
    char *aligned = (char *)(((uintptr_t)raw + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (aligned > raw) munmap(raw, (size_t)(aligned - raw));
    if (raw + slack > aligned) munmap(aligned + size, (size_t)(raw + slack - aligned));
#if defined(MADV_HUGEPAGE)
    madvise(aligned, size, MADV_HUGEPAGE); /* best effort: without it reads are slower, not wrong */
#endif
    return aligned;
}

void pages_free(void *pages, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap(pages, (bytes + page - 1) / page * page);
}

#endif

#endif
