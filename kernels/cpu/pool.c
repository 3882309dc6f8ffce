/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/cpu/pool.h"

#include <assert.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "kernels/cpu/limit.h"

#define LINE 64
#define BLOCKS_OF_A_GRAIN 16u /* see pool_blocks */
#define BLOCKS_EACH 4u
#define BLOCKS_MOST 64u
#define LEFT_BITS 24
#define LEFT_MASK ((UINT64_C(1) << LEFT_BITS) - 1)
#define SPIN_START_NS 50000u /* before anybody has been woken */
#define STACK_BYTES ((size_t)1 << 20)

/*
 * `claim` is (sequence number of the current launch) << 24 | (its blocks not yet claimed). The
 * fields of the current launch are written only while nothing is left to claim. A thread reads them
 * between loading `claim` and the compare-and-swap that takes blocks; success proves that the
 * launch was still the same, so what it read was whole. A late thread reads stale or mixed fields
 * and fails the swap: harmless.
 */
struct pool {
    /* One cache line moves between processors to tell of a launch, another to count its blocks. */
    _Alignas(LINE) _Atomic uint64_t claim;
    _Atomic(pool_body_fn) body;
    _Atomic(const uint64_t *) args;
    _Atomic uint32_t n_blocks;

    _Alignas(LINE) _Atomic uint32_t done; /* finished blocks of the current launch */
    /* Owned by whoever finished the last block, or by the caller between runs. */
    uint32_t next, count;
    const struct pool_launch *list;
    uint64_t *ns; /* NULL: nobody wants times; else a launch's begins where began_ns says */
    uint64_t began_ns;

    _Alignas(LINE) _Atomic uint32_t runs_done; /* number of the last finished run */
    _Atomic uint32_t sleepers;                 /* 1: somebody may sleep on `wake` */
    _Atomic uint32_t wake;                     /* futex, counts wake-ups */
    _Atomic uint64_t woke_ns;                  /* when it was last counted up */
    _Atomic uint32_t spin_ns;                  /* what waking has cost lately, within bounds */
    _Atomic uint32_t n_asleep;
    _Atomic bool stop;

    uint32_t runs; /* the caller's */
    uint32_t n_threads;
    uint32_t n_started; /* threads of our own */
    bool tried_start;
    pthread_t *threads;
    struct id_set *places;    /* of each thread, the caller first; NULL: anywhere */
    _Atomic uint32_t n_named; /* threads that know which of them they are */
};

struct share {
    pool_body_fn body;
    const uint64_t *args;
    uint32_t n_blocks, first, count;
};

static inline void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/*
 * Blocks to take of `left`: large pieces first, single ones at the end. A quarter of a fair share,
 * so that a thread that is four times slower than the others (a busy neighbour of its processor
 * does that for seconds) is through with its first piece when they are with everything else.
 */
static uint32_t piece(const struct pool *pool, uint32_t left)
{
    uint32_t n = left / (4 * pool->n_threads);
    return n ? n : 1;
}

static bool grab(struct pool *pool, struct share *share)
{
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);

    for (;;) {
        uint32_t left = (uint32_t)(claim & LEFT_MASK);
        if (!left)
            return false;
        share->body = atomic_load_explicit(&pool->body, memory_order_relaxed);
        share->args = atomic_load_explicit(&pool->args, memory_order_relaxed);
        share->n_blocks = atomic_load_explicit(&pool->n_blocks, memory_order_relaxed);
        share->count = piece(pool, left);
        if (atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim - share->count,
                                                  memory_order_acq_rel, memory_order_acquire)) {
            share->first = share->n_blocks - left;
            return true;
        }
    }
}

/* Behind a seq_cst store that sleepers re-check before they sleep: nobody misses both. */
static void wake_sleepers(struct pool *pool)
{
    if (!atomic_load(&pool->sleepers))
        return;
    atomic_store(&pool->sleepers, 0);
    atomic_store_explicit(&pool->woke_ns, clock_ns(), memory_order_relaxed);
    atomic_fetch_add(&pool->wake, 1);
    futex_wake_all(&pool->wake);
}

/* This thread slept from `since` until now: what its waking took moves the spin a quarter of the
 * way. Threads that do so at the same time lose a measurement, no more. */
static void learn_wake(struct pool *pool, uint64_t since)
{
    uint64_t woke = atomic_load_explicit(&pool->woke_ns, memory_order_relaxed), now = clock_ns();
    uint64_t spin = atomic_load_explicit(&pool->spin_ns, memory_order_relaxed);

    if (woke <= since || woke > now) /* a signal, or a wake that came before it slept */
        return;
    spin = (3 * spin + MIN(now - woke, POOL_SPIN_MOST_NS)) / 4;
    atomic_store_explicit(&pool->spin_ns, (uint32_t)MAX(spin, POOL_SPIN_LEAST_NS),
                          memory_order_relaxed);
}

static void *worker(void *arg);

/* Fewer threads than asked for is slower, not wrong. */
static void start_threads(struct pool *pool)
{
    pthread_attr_t attr;
    sigset_t all, old;

    pool->tried_start = true;
    if (pool->n_threads == 1) {
        cpus_bind(&pool->places[0]);
        return;
    }
    pool->threads = mem_alloc(pool->n_threads - 1, sizeof *pool->threads);
    if (!pool->threads || pthread_attr_init(&attr))
        return;
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool->n_started < pool->n_threads - 1 &&
           !pthread_create(&pool->threads[pool->n_started], &attr, worker, pool))
        pool->n_started++;
    if (pool->places) /* the others have begun where we could run */
        cpus_bind(&pool->places[0]);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}

/* Puts up a launch and keeps the first piece of it for this thread. */
static void publish(struct pool *pool, const struct pool_launch *launch, struct share *share)
{
    uint64_t sequence = (atomic_load_explicit(&pool->claim, memory_order_relaxed) >> LEFT_BITS) + 1;
    uint32_t n = launch->n_blocks;

    if (!pool->tried_start)
        start_threads(pool);
    *share = (struct share){launch->body, launch->args, n, 0, piece(pool, n)};
    atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->body, launch->body, memory_order_relaxed);
    atomic_store_explicit(&pool->args, launch->args, memory_order_relaxed);
    atomic_store_explicit(&pool->n_blocks, n, memory_order_relaxed);
    atomic_store(&pool->claim, sequence << LEFT_BITS | (n - share->count));
    wake_sleepers(pool);
    if (pool->ns) /* whoever finishes the launch has seen our piece done, and with it this */
        pool->began_ns = clock_ns();
}

/* Launch next - 1 is done. */
static inline void finished(struct pool *pool)
{
    if (pool->ns)
        pool->ns[pool->next - 1] += clock_ns() - pool->began_ns;
}

/*
 * Goes on with the run behind a finished launch. True: *share is the first piece of the next one;
 * false: the run is over and has been declared so.
 */
static bool advance(struct pool *pool, struct share *share)
{
    while (pool->next < pool->count) {
        const struct pool_launch *launch = &pool->list[pool->next++];
        if (launch->n_blocks == 1) {
            if (pool->ns)
                pool->began_ns = clock_ns();
            launch->body(launch->args, 0, 1);
            finished(pool);
        } else if (launch->n_blocks > 1) {
            publish(pool, launch, share);
            return true;
        }
    }
    atomic_store(&pool->runs_done,
                 atomic_load_explicit(&pool->runs_done, memory_order_relaxed) + 1);
    wake_sleepers(pool);
    return false;
}

static void run_share(const struct share *share)
{
    for (uint32_t i = 0; i < share->count; i++)
        share->body(share->args, share->first + i, share->n_blocks);
}

/* Does *share and whatever follows from it, for as long as there is something to claim. */
static void work(struct pool *pool, struct share *share)
{
    do {
        uint32_t count = share->count, n_blocks = share->n_blocks;

        run_share(share);
        if (atomic_fetch_add_explicit(&pool->done, count, memory_order_acq_rel) + count ==
            n_blocks) {
            finished(pool);
            if (!advance(pool, share))
                return;
        } else if (!grab(pool, share)) {
            return;
        }
    } while (true);
}

/* What a thread waits for: blocks to claim, or the end of run `run` (callers), or of the pool
 * (workers). */
static bool ready(struct pool *pool, bool is_worker, uint32_t run)
{
    if (atomic_load(&pool->claim) & LEFT_MASK)
        return true;
    return is_worker ? atomic_load(&pool->stop) : atomic_load(&pool->runs_done) == run;
}

static bool spin(struct pool *pool, bool is_worker, uint32_t run)
{
    const uint64_t most = pool_spin_ns(pool), polite = most / 5;
    uint64_t start = 0, waited = 0;

    for (unsigned i = 0;; i++) {
        if (ready(pool, is_worker, run))
            return true;
        if (waited < polite)
            cpu_relax();
        else
            sched_yield();
        if (i % 32 == 31 || waited >= polite) {
            uint64_t now = clock_ns();
            start = start ? start : now;
            waited = now - start;
            if (waited >= most)
                return false;
        }
    }
}

static void wait_ready(struct pool *pool, bool is_worker, uint32_t run)
{
    while (!spin(pool, is_worker, run)) {
        uint32_t wake = atomic_load(&pool->wake);
        atomic_store(&pool->sleepers, 1);
        if (ready(pool, is_worker, run))
            return;
        atomic_fetch_add(&pool->n_asleep, 1);
        uint64_t since = clock_ns();
        futex_wait(&pool->wake, wake);
        learn_wake(pool, since);
        atomic_fetch_sub(&pool->n_asleep, 1);
    }
}

static void *worker(void *arg)
{
    struct pool *pool = arg;
    struct share share;

    pthread_setname_np(pthread_self(), "ember-pool");
    if (pool->places)
        cpus_bind(&pool->places[atomic_fetch_add(&pool->n_named, 1) + 1]);
    while (!atomic_load(&pool->stop)) {
        if (grab(pool, &share))
            work(pool, &share);
        else
            wait_ready(pool, true, 0);
    }
    return NULL;
}

static void run_alone(const struct pool_launch *list, uint32_t count, uint64_t *ns)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t began = ns ? clock_ns() : 0;
        for (uint32_t b = 0; b < list[i].n_blocks; b++)
            list[i].body(list[i].args, b, list[i].n_blocks);
        if (ns)
            ns[i] += clock_ns() - began;
    }
}

void pool_run(struct pool *pool, const struct pool_launch *list, uint32_t count)
{
    pool_run_timed(pool, list, count, NULL);
}

void pool_run_timed(struct pool *pool, const struct pool_launch *list, uint32_t count, uint64_t *ns)
{
    struct share share;
    uint32_t run;

    if (pool->n_threads == 1) {
        if (pool->places && !pool->tried_start)
            start_threads(pool);
        run_alone(list, count, ns);
        return;
    }
    assert(atomic_load(&pool->runs_done) == pool->runs); /* one run at a time */
    run = ++pool->runs;
    pool->list = list;
    pool->ns = ns;
    pool->next = 0;
    pool->count = count;
    if (advance(pool, &share))
        work(pool, &share);
    while (atomic_load_explicit(&pool->runs_done, memory_order_acquire) != run) {
        if (grab(pool, &share))
            work(pool, &share);
        else
            wait_ready(pool, false, run);
    }
}

struct pool *pool_new(uint32_t threads)
{
    struct pool *pool;

    if (posix_memalign((void **)&pool, LINE, sizeof *pool))
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->spin_ns = SPIN_START_NS;
    pool->n_threads = MIN(threads ? threads : cpu_limit(), POOL_THREADS_MAX);
    return pool;
}

void pool_place(struct pool *pool, struct placement *where)
{
    assert(!pool->tried_start && !pool->places && where->n_threads == pool->n_threads);
    pool->places = TAKE(where->threads);
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    if (pool->places && pool->tried_start)
        cpus_unbind();
    atomic_store(&pool->stop, true);
    wake_sleepers(pool);
    for (uint32_t i = 0; i < pool->n_started; i++)
        pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    free(pool->places);
    free(pool);
}

uint32_t pool_blocks(const struct pool *pool, uint32_t grains)
{
    uint32_t each = BLOCKS_EACH * pool->n_threads;
    uint32_t least = MAX(BLOCKS_OF_A_GRAIN, each), most = MAX(BLOCKS_MOST, each);

    return grains <= least ? grains : MIN(MAX(grains / 4, least), most);
}

uint32_t pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}

uint32_t pool_started(const struct pool *pool)
{
    return pool->n_started;
}

uint32_t pool_asleep(const struct pool *pool)
{
    return atomic_load(&pool->n_asleep);
}

uint32_t pool_spin_ns(const struct pool *pool)
{
    return atomic_load_explicit(&pool->spin_ns, memory_order_relaxed);
}
