/* Abstracts operating systems and compiler targets: threads, parking, memory, exports. */
#ifndef BN_PLATFORM_H
#define BN_PLATFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
/* As large as SRWLOCK, CONDITION_VARIABLE, HANDLE and DWORD of <windows.h>, whose macros stay out of our files. */
#define BN_API __declspec(dllexport)
typedef struct {
    void *lock;
} mutex_t;
typedef struct {
    void *variable;
} condition_t;
typedef void *thread_t;
typedef unsigned long process_id_t;
#elif defined(__wasm__)
#define BN_API __attribute__((visibility("default")))
#else
#include <pthread.h>
#include <sys/types.h>
#define BN_API __attribute__((visibility("default")))
typedef pthread_mutex_t mutex_t;
typedef pthread_cond_t condition_t;
typedef pthread_t thread_t;
typedef pid_t process_id_t;
#endif

#if !defined(__wasm__) /* which has one thread: pool_one.c */
void mutex_init(mutex_t *mutex);
void mutex_lock(mutex_t *mutex);
void mutex_unlock(mutex_t *mutex);
void condition_init(condition_t *condition);
void condition_wait(condition_t *condition, mutex_t *mutex);
void condition_wake_all(condition_t *condition);
bool thread_start(thread_t *thread, void (*body)(void *), void *argument);
void thread_join(thread_t thread);
process_id_t process_id(void);

/* Nanoseconds that have passed, and those in which this thread has run. */
int64_t wall_time(void);
int64_t run_time(void);
#endif

/* Zeroed memory of whole pages, on huge pages where the system grants them. NULL when there is none. */
void *pages_alloc(size_t bytes);
void pages_free(void *pages, size_t bytes);

/* Tell the processor that this is a spin loop. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* `yield` is a no-op on most cores; `isb` waits about as long as x86's pause */
#endif
}

#endif
