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
#define STACK_BYTES ((size_t)4 << 20)

/* Where threads sleep. */
struct bed {
    _Atomic uint32_t wake;   /* futex, counts wake-ups */
    _Atomic uint32_t asleep; /* threads, or about to be */
};

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
    struct bed workers, caller;
    _Atomic uint32_t active;  /* threads that this run has use for; a futex of those it has not */
    _Atomic uint32_t n_idle;  /* asleep there */
    _Atomic uint64_t woke_ns; /* when somebody was last woken */
    _Atomic uint32_t spin_ns; /* what waking has cost lately, within bounds */
    _Atomic bool stop;

    uint32_t runs; /* the caller's */
    uint32_t n_threads;
    uint32_t n_started; /* threads of our own */
    bool tried_start;
    pthread_t *threads;
    struct id_set *places; /* of each thread, the caller first; NULL: anywhere */
    uint32_t unbound_runs;
    _Atomic bool bind;        /* each thread to its place */
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
    uint32_t n = left / (4 * atomic_load_explicit(&pool->active, memory_order_relaxed));
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

/* Behind a seq_cst store that sleepers re-check once they count as asleep: nobody misses both. */
static void wake(struct pool *pool, struct bed *bed)
{
    if (!atomic_load(&bed->asleep))
        return;
    atomic_store_explicit(&pool->woke_ns, clock_ns(), memory_order_relaxed);
    atomic_fetch_add(&bed->wake, 1);
    futex_wake_all(&bed->wake);
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
    pool->threads = mem_alloc(pool->n_threads - 1, sizeof *pool->threads);
    if (!pool->threads || pthread_attr_init(&attr))
        return;
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool->n_started < pool->n_threads - 1 &&
           !pthread_create(&pool->threads[pool->n_started], &attr, worker, pool))
        pool->n_started++;
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
    wake(pool, &pool->caller);
    wake(pool, &pool->workers);
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
    wake(pool, &pool->caller);
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

/* Who waits, and for what beside blocks to claim: the caller for the end of run `run`, a worker for
 * the pool's. */
struct waiter {
    struct bed *bed;
    uint32_t index; /* of the thread; the caller is 0 */
    uint32_t run;
};

static bool is_active(const struct pool *pool, const struct waiter *w)
{
    return w->index < atomic_load_explicit(&pool->active, memory_order_relaxed);
}

static bool ready(struct pool *pool, const struct waiter *w)
{
    if (atomic_load(&pool->claim) & LEFT_MASK)
        return true;
    return w->index ? atomic_load(&pool->stop) : atomic_load(&pool->runs_done) == w->run;
}

static bool spin(struct pool *pool, const struct waiter *w)
{
    const uint64_t most = pool_spin_ns(pool), polite = most / 5;
    uint64_t start = 0, waited = 0;

    for (unsigned i = 0;; i++) {
        if (ready(pool, w))
            return true;
        if (waited < polite)
            cpu_relax();
        else
            sched_yield();
        if (i % 32 == 31 || waited >= polite) {
            uint64_t now = clock_ns();
            start = start ? start : now;
            waited = now - start;
            if (waited >= most || !is_active(pool, w))
                return false;
        }
    }
}

static void wait_ready(struct pool *pool, const struct waiter *w)
{
    struct bed *bed = w->bed;

    while (!spin(pool, w) && is_active(pool, w)) {
        uint32_t seen = atomic_load(&bed->wake);
        atomic_fetch_add(&bed->asleep, 1);
        if (!ready(pool, w)) {
            uint64_t since = clock_ns();
            futex_wait(&bed->wake, seen);
            learn_wake(pool, since);
        }
        atomic_fetch_sub(&bed->asleep, 1);
    }
}

/* Nothing that this run has is for so many threads. */
static void wait_active(struct pool *pool, const struct waiter *w)
{
    uint32_t active = atomic_load(&pool->active);

    atomic_fetch_add(&pool->n_idle, 1);
    if (w->index >= active && !atomic_load(&pool->stop))
        futex_wait(&pool->active, active);
    atomic_fetch_sub(&pool->n_idle, 1);
}

static void *worker(void *arg)
{
    struct pool *pool = arg;
    struct waiter w = {&pool->workers, atomic_fetch_add(&pool->n_named, 1) + 1, 0};
    struct share share;
    bool bound = false;

    pthread_setname_np(pthread_self(), "ember-pool");
    if (!pool->places)
        cpus_unbind(); /* who started this may be bound for another pool */
    while (!atomic_load(&pool->stop)) {
        if (!bound && atomic_load_explicit(&pool->bind, memory_order_acquire)) {
            cpus_bind(&pool->places[w.index]);
            bound = true;
        }
        if (!is_active(pool, &w))
            wait_active(pool, &w);
        else if (grab(pool, &share))
            work(pool, &share);
        else
            wait_ready(pool, &w);
    }
    return NULL;
}

/* How many threads are of use: as many as a launch that has several blocks has of them in the
 * middle. More would not be quicker with the blocks, but all of them are told of each launch. */
static void set_active(struct pool *pool, const struct pool_launch *list, uint32_t count)
{
    uint64_t blocks = 0, launches = 0;

    for (uint32_t i = 0; i < count; i++) {
        bool several = list[i].n_blocks > 1;
        blocks += several ? list[i].n_blocks : 0;
        launches += several;
    }
    uint32_t before = atomic_load_explicit(&pool->active, memory_order_relaxed);
    uint64_t mean = launches ? (blocks + launches / 2) / launches : before;
    uint32_t active = (uint32_t)MIN(MAX(mean, 2), pool->n_threads);
    if (active == before)
        return;
    atomic_store(&pool->active, active);
    if (active > before && atomic_load(&pool->n_idle))
        futex_wake_all(&pool->active);
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
    struct waiter w = {&pool->caller, 0, 0};
    struct share share;
    uint32_t run;

    if (pool->places && !pool->bind && ++pool->unbound_runs > POOL_UNBOUND_RUNS) {
        cpus_bind(&pool->places[0]);
        atomic_store_explicit(&pool->bind, true, memory_order_release);
    }
    if (pool->n_threads == 1) {
        run_alone(list, count, ns);
        return;
    }
    assert(atomic_load(&pool->runs_done) == pool->runs); /* one run at a time */
    w.run = run = ++pool->runs;
    pool->list = list;
    pool->ns = ns;
    pool->next = 0;
    pool->count = count;
    if (pool->n_threads > 2)
        set_active(pool, list, count);
    if (advance(pool, &share))
        work(pool, &share);
    while (atomic_load_explicit(&pool->runs_done, memory_order_acquire) != run) {
        if (grab(pool, &share))
            work(pool, &share);
        else
            wait_ready(pool, &w);
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
    pool->active = pool->n_threads;
    return pool;
}

void pool_place(struct pool *pool, struct placement *where)
{
    assert(!pool->unbound_runs && !pool->places && where->n_threads == pool->n_threads);
    pool->places = TAKE(where->threads);
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    if (pool->bind)
        cpus_unbind();
    atomic_store(&pool->stop, true);
    wake(pool, &pool->workers);
    atomic_store(&pool->active, pool->n_threads); /* another value than they wait with */
    futex_wake_all(&pool->active);
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
    return atomic_load(&pool->workers.asleep) + atomic_load(&pool->caller.asleep) +
           atomic_load(&pool->n_idle);
}

uint32_t pool_active(const struct pool *pool)
{
    return atomic_load(&pool->active);
}

uint32_t pool_spin_ns(const struct pool *pool)
{
    return atomic_load_explicit(&pool->spin_ns, memory_order_relaxed);
}
