/* Handles mapped files that lose pages while they are read, because they are truncated or their disk fails.
 *
 * The system sends SIGBUS to the reading thread. For an address in a guarded range the handler here puts zeroed memory
 * over that page and all after it, marks the range as lost, and the read goes on; the reader checks the mark. Every other
 * SIGBUS goes to the previous handler. The handler calls only mmap, sigaction and raise; mmap is a bare system call on
 * Linux and macOS. On Windows a mapped file cannot be cut short; WebAssembly maps none. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* MAP_ANONYMOUS, siginfo_t */
#endif
#include "platform.h"

#define RANGES 256

#if defined(_WIN32) || defined(__wasm__)

BN_API int bitnet_guard(const void *begin, size_t bytes) {
    (void)begin;
    (void)bytes;
    return -1;
}
BN_API void bitnet_unguard(int range) { (void)range; }
BN_API bool bitnet_guard_lost(int range) {
    (void)range;
    return false;
}

#else

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    _Atomic(uintptr_t) begin;
    _Atomic(size_t) bytes; /* 0: the range is free, or being made */
    atomic_bool used, lost;
} range_t;

static range_t ranges[RANGES];
static mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* held while the handler is installed or removed */
static int guarded;
static bool installed;
static struct sigaction before;
static uintptr_t page_size;

static bool in_guarded_range(uintptr_t at) {
    for (int i = 0; i < RANGES; i++) {
        const size_t bytes = atomic_load(&ranges[i].bytes);
        const uintptr_t begin = atomic_load(&ranges[i].begin);
        if (at < begin || at - begin >= bytes) continue;
        const uintptr_t page = at / page_size * page_size;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (mmap((void *)page, begin + bytes - page, PROT_READ, flags, -1, 0) == MAP_FAILED) return false;
        atomic_store(&ranges[i].lost, true);
        return true;
    }
    return false;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const int error = errno;
    if (info->si_code != BUS_ADRERR || !in_guarded_range((uintptr_t)info->si_addr)) {
        if (before.sa_flags & SA_SIGINFO) {
            before.sa_sigaction(number, info, context);
        } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
            before.sa_handler(number);
        } else { /* as the system would: it ignores no fault */
            struct sigaction deadly = {.sa_handler = SIG_DFL};
            if (before.sa_handler == SIG_DFL || (info->si_code != SI_USER && info->si_code != SI_QUEUE)) {
                sigaction(number, &deadly, NULL);
                raise(number);
            }
        }
    }
    errno = error;
}

static void install(void) {
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    /* The previous handler is stored before ours can run. */
    installed = sigaction(SIGBUS, NULL, &before) == 0 && sigaction(SIGBUS, &ours, NULL) == 0;
}

/* A handler that was installed after ours is kept: it may call ours, which then stays for good. */
static void uninstall(void) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) || !(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_bus_error) return;
    installed = sigaction(SIGBUS, &before, NULL) != 0;
}

/* Guard whole mapped pages until bitnet_unguard; -1 where that is impossible. */
BN_API int bitnet_guard(const void *begin, size_t bytes) {
    int range = -1;
    mutex_lock(&lock);
    if (guarded < RANGES) {
        if (!installed) install();
        for (int i = 0; installed && i < RANGES && range < 0; i++)
            if (!atomic_load(&ranges[i].used)) range = i;
    }
    if (range >= 0) {
        guarded++;
        atomic_store(&ranges[range].used, true);
        atomic_store(&ranges[range].lost, false);
        atomic_store(&ranges[range].begin, (uintptr_t)begin);
        atomic_store(&ranges[range].bytes, bytes);
    }
    mutex_unlock(&lock);
    return range;
}

/* To be called before the memory is unmapped. */
BN_API void bitnet_unguard(int range) {
    mutex_lock(&lock);
    atomic_store(&ranges[range].bytes, 0);
    atomic_store(&ranges[range].used, false);
    if (--guarded == 0) uninstall();
    mutex_unlock(&lock);
}

/* Whether pages of the range have been lost, and read as zeros. */
BN_API bool bitnet_guard_lost(int range) { return atomic_load(&ranges[range].lost); }

#endif
