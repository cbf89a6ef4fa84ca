/* What of the thread pool no program can be made to show in time, for test_pool.py: each case brings the pool where it would be
 * by chance. The exit status is 0 where all is well. */
#define _GNU_SOURCE /* usleep */
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "platform.h"

/* As pool.c calls it: in a child, the second caller takes longer, and comes to it when the first has the lock. */
static void slow_mutex_init(mutex_t *mutex);
#define mutex_init slow_mutex_init
#include "pool.c"
#undef mutex_init

static pid_t parent;
static atomic_int made;

static void slow_mutex_init(mutex_t *mutex) {
    if (getpid() != parent) usleep(atomic_fetch_add(&made, 1) % 2 ? 150000 : 50000);
    mutex_init(mutex);
}

#define ITEMS 64
static atomic_int given[ITEMS];

static void take_all(void *pool, int thread) {
    for (int64_t i; (i = pool_take(pool, thread, ITEMS)) >= 0;) atomic_fetch_add(&given[i], 1);
}

static bool each_given_once(pool_t *pool) {
    memset(given, 0, sizeof given);
    pool_run(pool, take_all, pool, false);
    int once = 0;
    for (int i = 0; i < ITEMS; i++) once += atomic_load(&given[i]) == 1;
    return once == ITEMS;
}

/* A thread is left out of so many jobs that the number of a phase comes again, and then takes part. */
static int left_out(void) {
    pool_t *pool = pool_new(2);
    bool well = each_given_once(pool);
    const uint64_t known = atomic_load(&pool->shares[1].taken) >> 48;
    pool->threads = 1;
    pool->again = INT64_MAX;
    do pool_run(pool, take_all, pool, false);
    while ((atomic_load(&pool->phase) & 0xffff) != known);
    pool->again = 0;
    well = well && each_given_once(pool);
    pool_delete(pool);
    return !well;
}

static atomic_int inside;
static atomic_bool met;

static void stay(void *argument, int thread) {
    (void)argument;
    if (thread) return;
    if (atomic_fetch_add(&inside, 1)) met = true;
    usleep(300000);
    atomic_fetch_sub(&inside, 1);
}

static void run(void *pool) { pool_run(pool, stay, pool, false); }

/* The first jobs of a child are those of two threads at once. */
static int forked(void) {
    pool_t *pool = pool_new(2);
    pool_run(pool, take_all, pool, false);
    const pid_t child = fork();
    if (child == 0) {
        thread_t threads[2];
        for (int i = 0; i < 2; i++)
            if (!thread_start(&threads[i], run, pool)) _exit(2);
        for (int i = 0; i < 2; i++) thread_join(threads[i]);
        _exit(met);
    }
    int status;
    waitpid(child, &status, 0);
    pool_delete(pool);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 3;
}

int main(int count, char **arguments) {
    parent = getpid();
    alarm(30);
    if (count == 2 && !strcmp(arguments[1], "left_out")) return left_out();
    if (count == 2 && !strcmp(arguments[1], "forked")) return forked();
    return 4;
}
