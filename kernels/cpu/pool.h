/* A team of threads that runs one job at a time: every thread enters it, and they meet at barriers inside. */
#ifndef BN_POOL_H
#define BN_POOL_H

#include <stdatomic.h>

#include "platform.h"

typedef struct pool pool_t;
typedef void (*job_t)(void *argument, int thread);

/* Threads are started by the first run, not here. NULL without memory. */
pool_t *pool_new(int threads);
void pool_delete(pool_t *pool);

/* Run `job(argument, thread)` on the threads, the caller being thread 0, and return when all are done. Callers queue. In a
 * `whole` job, one that is long and has few barriers for its length, no thread is left out. */
void pool_run(pool_t *pool, job_t job, void *argument, bool whole);

/* Threads of the running job: those of the pool, or fewer where other programs keep some from running. */
int pool_threads(const pool_t *pool);

/* Inside a job: wait until every thread is here. All then see what the others wrote before. */
void pool_barrier(pool_t *pool, int thread);

/* Memory that a thread reads soon. */
typedef struct {
    const uint8_t *next, *end;
} stretch_t;

/* The same, and fetch a stretch into the cache while waiting; `next` moves on. */
void pool_barrier_fetching(pool_t *pool, int thread, stretch_t *soon);

/*
 * Inside a job: one of the items 0 … total - 1, each handed out once between two barriers, or -1 when there is none left.
 * A thread walks its own share front to back, which suits prefetching, and then helps others with the ends of theirs, so
 * that one delayed thread does not delay the rest. Each call until the barrier names the same total.
 */
int64_t pool_take(pool_t *pool, int thread, int64_t total);

/* The first item of a thread's share. */
int64_t pool_share(const pool_t *pool, int thread, int64_t total);

#endif
