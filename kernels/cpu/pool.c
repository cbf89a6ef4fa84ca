/*
 * Threads wait by spinning for some microseconds, since the next job or barrier usually comes at once, and then park, so
 * that they cost an idle machine nothing. After a fork the child has none of the threads: the pool notices by the
 * process id and starts its own.
 *
 * If other programs use the same processors, a thread may have to wait milliseconds for its turn, and at every barrier
 * all others wait for it. So each thread counts the time in which it could have run and did not; when fewer threads
 * would have done the work of a job in less time, the next jobs get fewer, until it is time to try again. Long jobs are
 * exempt: their threads seldom meet, and too few of them would stay too few for long.
 */
#include "pool.h"

#include <stdlib.h>

#define SPINS 1500 /* some tens of microseconds: longer than a barrier takes, shorter than a time slice */
#define STARVED 300000 /* minimum nanoseconds of a job that a thread was kept from running */
#define MIN_HOLD ((int64_t)50 * 1000 * 1000) /* nanoseconds before more threads are tried again: at first, */
#define MAX_HOLD ((int64_t)2000 * 1000 * 1000) /* and doubled up to this where that was in vain */
#define TEAM_BITS 11 /* of the word `jobs` */
#define CACHE_LINE 128 /* two lines, as x86 prefetches them in pairs */

/* Items taken of a thread's share: 16 bits of the phase it belongs to, then 24 bits each of items taken from the back
 * and from the front. Counts of an earlier phase count as none, so nothing has to be reset while a thread takes part. */
typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t taken;
} share_t;

struct pool {
    _Alignas(CACHE_LINE) atomic_uint jobs; /* changes when there is a job: its number, and its threads */
    job_t job;
    void *argument;
    atomic_bool stop;
    int64_t begun; /* when the job was given out */
    _Alignas(CACHE_LINE) atomic_uint phase; /* changes when the last thread reaches a barrier */
    _Alignas(CACHE_LINE) atomic_int arrived;
    _Alignas(CACHE_LINE) atomic_int parked;
    mutex_t park;
    condition_t unpark;
    int64_t unparked; /* when parked threads were last woken */
    mutex_t running;
    _Atomic process_id_t process; /* process that owns the threads; 0 before the first job */
    _Atomic process_id_t locked_in; /* process whose lock `running` is; negated while one of its threads makes it */
    int wanted, started, threads; /* `threads` of those started do this job */
    int64_t hold, again; /* more are tried again at `again`, `hold` after they were found to be too many */
    thread_t *handles;
    share_t *shares;
    struct member {
        _Alignas(CACHE_LINE) struct pool *pool;
        int thread;
        unsigned seen;
        int64_t spun, parked; /* nanoseconds of this job, and of waiting for the next: this thread's own */
        int64_t worked, starved; /* of this job: for all after it */
    } *members;
};

/* Wait until `*word` is no longer `old`. */
static void wait_change(struct member *member, atomic_uint *word, unsigned old, stretch_t *soon) {
    pool_t *pool = member->pool;
    if (atomic_load_explicit(word, memory_order_acquire) != old) return;
    const int64_t begin = wall_time();
    for (int spin = 0; spin < SPINS;) {
        if (atomic_load_explicit(word, memory_order_acquire) != old) {
            member->spun += wall_time() - begin;
            return;
        }
        if (soon && soon->next < soon->end) {
            __builtin_prefetch(soon->next, 0, 2);
            soon->next += 64;
        } else {
            cpu_relax();
            spin++;
        }
    }
    const int64_t parked = wall_time();
    member->spun += parked - begin;
    mutex_lock(&pool->park);
    atomic_fetch_add(&pool->parked, 1);
    while (atomic_load(word) == old) condition_wait(&pool->unpark, &pool->park);
    atomic_fetch_sub(&pool->parked, 1);
    if (pool->unparked > parked) member->parked += pool->unparked - parked; /* the rest is waiting for a processor */
    mutex_unlock(&pool->park);
}

/* Change `*word` and wake the threads parked on it. The order of store and load, here and above, loses no wake-up. It is an
 * exchange because qemu lets the load overtake Arm's store-release, on x86; elsewhere it costs what the store does. */
static void change(pool_t *pool, atomic_uint *word, unsigned value) {
    atomic_exchange(word, value);
    if (atomic_load(&pool->parked) == 0) return;
    mutex_lock(&pool->park);
    pool->unparked = wall_time();
    condition_wake_all(&pool->unpark);
    mutex_unlock(&pool->park);
}

static void meet(struct member *member, stretch_t *soon) {
    pool_t *pool = member->pool;
    const unsigned phase = atomic_load(&pool->phase);
    const int threads = pool->threads; /* read before arriving: once all are here, the next job may have fewer */
    if (threads == 1) {
        atomic_store_explicit(&pool->phase, phase + 1, memory_order_relaxed);
        return;
    }
    if (atomic_fetch_add(&pool->arrived, 1) == threads - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        change(pool, &pool->phase, phase + 1);
    } else {
        wait_change(member, &pool->phase, phase, soon);
    }
}

/* A thread's part of a job, and how much of the time it had a processor. */
static void take_part(struct member *member) {
    pool_t *pool = member->pool;
    if (pool->threads == 1) {
        pool->job(pool->argument, member->thread);
    } else {
        member->spun = member->parked = 0;
        const int64_t before = run_time();
        pool->job(pool->argument, member->thread);
        const int64_t ran = run_time() - before;
        member->worked = ran - member->spun;
        member->starved = wall_time() - pool->begun - ran - member->parked;
    }
    meet(member, NULL);
}

static void work(void *raw) {
    struct member *member = raw;
    pool_t *pool = member->pool;
    for (;;) {
        wait_change(member, &pool->jobs, member->seen, NULL);
        member->seen = atomic_load(&pool->jobs);
        if (pool->stop) return;
        if (member->thread >= (int)(member->seen & ((1u << TEAM_BITS) - 1))) continue; /* fewer threads do this job */
        take_part(member);
    }
}

/* Mark the shares of thread `first` and of later threads as untouched. They hold the number of an earlier phase, which may
 * look like the current one's, as it has 16 bits. */
static void renew_shares(pool_t *pool, int first) {
    const uint64_t phase = atomic_load(&pool->phase) & 0xffff;
    for (int i = first; i < pool->wanted; i++)
        atomic_store_explicit(&pool->shares[i].taken, phase << 48, memory_order_relaxed);
}

static void start(pool_t *pool) {
    mutex_init(&pool->park);
    condition_init(&pool->unpark);
    atomic_store(&pool->parked, 0);
    atomic_store(&pool->arrived, 0);
    renew_shares(pool, 0); /* items that the parent's threads took before the fork are not done here */
    pool->process = process_id();
    pool->started = 1;
    unsigned seen = atomic_load(&pool->jobs);
    pool->members[0] = (struct member){.pool = pool};
    for (int i = 1; i < pool->wanted; i++) {
        pool->members[i] = (struct member){.pool = pool, .thread = i, .seen = seen};
        if (!thread_start(&pool->handles[i], work, &pool->members[i])) break; /* fewer threads are slower, not wrong */
        pool->started = i + 1;
    }
    pool->threads = pool->started;
}

/* After a job: decide whether fewer threads would have finished earlier, and when to try more again. */
static void adapt(pool_t *pool, int64_t now) {
    int64_t done = 0; /* the work itself, by all threads */
    const int64_t took = now - pool->begun;
    int starved = 0;
    for (int i = 0; i < pool->threads; i++) {
        const struct member *member = &pool->members[i];
        starved += member->starved > STARVED && member->starved > took / 5;
        done += member->worked;
    }
    const int fewer = pool->threads - starved > 1 ? pool->threads - starved : 1;
    if (starved && done < took / 10 * 9 * fewer) {
        pool->hold = pool->hold * 2 > MAX_HOLD ? MAX_HOLD : pool->hold * 2 > MIN_HOLD ? pool->hold * 2 : MIN_HOLD;
        pool->again = now + pool->hold;
        pool->threads = fewer;
    } else if (pool->threads == pool->started && !starved) {
        pool->hold = 0;
    }
}

static void release(pool_t *pool) {
    free(pool->handles);
    if (pool->shares) pages_free(pool->shares, (size_t)pool->wanted * sizeof *pool->shares);
    if (pool->members) pages_free(pool->members, (size_t)pool->wanted * sizeof *pool->members);
    pages_free(pool, sizeof *pool);
}

pool_t *pool_new(int threads) {
    pool_t *pool = pages_alloc(sizeof *pool);
    if (!pool) return NULL;
    pool->wanted = threads;
    pool->threads = threads;
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    pool->members = pages_alloc((size_t)threads * sizeof *pool->members);
    pool->shares = pages_alloc((size_t)threads * sizeof *pool->shares);
    mutex_init(&pool->running);
    pool->locked_in = process_id();
    if (pool->handles && pool->members && pool->shares) return pool;
    release(pool);
    return NULL;
}

void pool_delete(pool_t *pool) {
    if (pool->process == process_id()) { /* not in a forked child, which has no such threads to join */
        pool->stop = true;
        change(pool, &pool->jobs, atomic_load(&pool->jobs) + (1u << TEAM_BITS));
        for (int i = 1; i < pool->started; i++) thread_join(pool->handles[i]);
    }
    release(pool);
}

/* Take the lock. A thread of the parent may have held it at the fork: the child has a new one, and as several of its threads
 * may ask for it at once, the first makes it while the others wait. */
static void lock(pool_t *pool) {
    const process_id_t self = process_id();
    process_id_t other = atomic_load(&pool->locked_in);
    while (other != self)
        if (other == -self) {
            cpu_relax();
            other = atomic_load(&pool->locked_in);
        } else if (atomic_compare_exchange_strong(&pool->locked_in, &other, -self)) {
            mutex_init(&pool->running);
            atomic_store(&pool->locked_in, self);
            other = self;
        }
    mutex_lock(&pool->running);
}

void pool_run(pool_t *pool, job_t job, void *argument, bool whole) {
    lock(pool);
    if (pool->process != process_id()) start(pool);
    pool->job = job;
    pool->argument = argument;
    const int fewer = pool->threads;
    if (pool->started > 1) {
        pool->begun = wall_time();
        if (fewer < pool->started && (whole || pool->begun >= pool->again)) {
            renew_shares(pool, fewer);
            pool->threads = pool->started;
        }
    }
    if (pool->threads > 1) {
        const unsigned number = (atomic_load(&pool->jobs) >> TEAM_BITS) + 1;
        change(pool, &pool->jobs, number << TEAM_BITS | (unsigned)pool->threads);
    }
    take_part(&pool->members[0]);
    if (whole)
        pool->threads = fewer;
    else if (pool->threads > 1)
        adapt(pool, wall_time());
    mutex_unlock(&pool->running);
}

int pool_threads(const pool_t *pool) { return pool->threads; }

void pool_barrier(pool_t *pool, int thread) { meet(&pool->members[thread], NULL); }

void pool_barrier_fetching(pool_t *pool, int thread, stretch_t *soon) { meet(&pool->members[thread], soon); }

/* Take an item of a share of `size`, or -1. Finding none leaves the phase in the word of one's own share: so no word is
 * ever 65,536 phases old, when it would be mistaken for this one's. */
static int64_t take(share_t *share, uint64_t phase, int64_t size, bool back) {
    uint64_t old = atomic_load_explicit(&share->taken, memory_order_relaxed);
    for (;;) {
        const uint64_t now = old >> 48 == phase ? old : phase << 48;
        const int64_t from_front = now & 0xffffff, from_back = now >> 24 & 0xffffff;
        const bool none = from_front + from_back >= size;
        if (none && (back || now == old)) return -1;
        const uint64_t then = none ? now : now + (back ? (uint64_t)1 << 24 : 1);
        if (!atomic_compare_exchange_weak_explicit(
                &share->taken, &old, then, memory_order_relaxed, memory_order_relaxed))
            continue;
        if (none) return -1;
        return back ? size - 1 - from_back : from_front;
    }
}

int64_t pool_share(const pool_t *pool, int thread, int64_t total) {
    return (total * thread + pool->threads - 1) / pool->threads;
}

int64_t pool_take(pool_t *pool, int thread, int64_t total) {
    const int threads = pool->threads;
    const uint64_t phase = atomic_load_explicit(&pool->phase, memory_order_relaxed) & 0xffff;
    int64_t begin = pool_share(pool, thread, total), size = pool_share(pool, thread + 1, total) - begin;
    int64_t item = take(&pool->shares[thread], phase, size, false);
    if (item >= 0) return begin + item;
    if (total <= threads) return -1; /* an item each at most: nothing to help with */
    /* With many threads, ask some near and some far, not all. */
    for (int step = 1; step < threads; step += 1 + step / 4) {
        const int other = (thread + step) % threads;
        begin = pool_share(pool, other, total);
        size = pool_share(pool, other + 1, total) - begin;
        item = take(&pool->shares[other], phase, size, true);
        if (item >= 0) return begin + item;
    }
    return -1;
}
