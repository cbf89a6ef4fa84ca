/* The pool of WebAssembly, which has no threads: the caller does every job. Items are handed out front to back. */
#include "pool.h"

#include <stdlib.h>

struct pool {
    int64_t taken; /* since the last barrier */
};

pool_t *pool_new(int threads) {
    (void)threads;
    return calloc(1, sizeof(pool_t));
}

void pool_delete(pool_t *pool) { free(pool); }

void pool_run(pool_t *pool, job_t job, void *argument, bool whole) {
    (void)whole;
    job(argument, 0);
    pool->taken = 0;
}

int pool_threads(const pool_t *pool) {
    (void)pool;
    return 1;
}

void pool_barrier(pool_t *pool, int thread) {
    (void)thread;
    pool->taken = 0;
}

void pool_barrier_fetching(pool_t *pool, int thread, stretch_t *soon) {
    (void)soon;
    pool_barrier(pool, thread);
}

int64_t pool_take(pool_t *pool, int thread, int64_t total) {
    (void)thread;
    return pool->taken < total ? pool->taken++ : -1;
}

int64_t pool_share(const pool_t *pool, int thread, int64_t total) {
    (void)pool;
    return thread ? total : 0;
}
