/* SPDX-License-Identifier: Apache-2.0 */
/* Many processes and threads on one cache: one builder a key, nobody hangs, whoever dies. */
#include "util.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"

#define KEYS 20
#define PROCESSES 8
#define WAITERS 6

/* Shared by all processes of a test. */
struct shared {
    atomic_int builds[KEYS];
    atomic_int building; /* builders at work now */
    atomic_int started, opened, waits;
    atomic_int overlap; /* two builders of one key at once: must stay 0 */
    atomic_int in_build[KEYS];
    atomic_int told_pid;
};

struct fixture {
    char *dir;
    struct shared *shared;
};

static int setup(void **state)
{
    struct fixture *f = x_alloc(sizeof *f);

    f->dir = dir_make();
    f->shared =
        mmap(NULL, sizeof *f->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *state = f;
    return f->shared == MAP_FAILED;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    unsetenv("EMBER_FAULT");
    fault_init();
    munmap(f->shared, sizeof *f->shared);
    dir_remove(f->dir);
    free(f);
    return 0;
}

/* One caller's build of key number n. */
struct job {
    struct shared *shared;
    unsigned n;
    unsigned ms;
    int fail; /* errno to fail with */
};

static int build(void *ctx, struct buffer *out, struct error *err)
{
    struct job *job = ctx;
    uint8_t bytes[3000];

    atomic_fetch_add(&job->shared->building, 1);
    if (atomic_fetch_add(&job->shared->in_build[job->n], 1))
        atomic_fetch_add(&job->shared->overlap, 1);
    atomic_fetch_add(&job->shared->builds[job->n], 1);
    usleep(job->ms * 1000);
    atomic_fetch_sub(&job->shared->in_build[job->n], 1);
    atomic_fetch_sub(&job->shared->building, 1);
    if (job->fail)
        return error_set(err, job->fail, "error %d of the compiler", job->fail);
    fill(bytes, sizeof bytes, job->n);
    return buffer_append(out, bytes, sizeof bytes);
}

static int note_wait(void *ctx, const struct cache_wait *wait)
{
    struct job *job = ctx;

    atomic_fetch_add(&job->shared->waits, 1);
    atomic_store(&job->shared->told_pid, wait->builder);
    return strstr(wait->text, "kernel 'k'") ? 0 : 1;
}

static int give_up(void *ctx, const struct cache_wait *wait)
{
    return wait->waited_ms >= 50;
}

/* cache_get_or_build; -EILSEQ when the bytes are not those of key n. */
static int run_job(struct cache *cache, struct job *job, int64_t timeout_ms,
                   int (*wait)(void *, const struct cache_wait *), struct error *err)
{
    _cleanup_(cache_key_freep) struct cache_key *key = key_of("k", job->n);
    _cleanup_cache_value_ struct cache_value value = {0};
    struct cache_build b = {build, job, timeout_ms, wait, job};
    uint8_t bytes[3000];
    int r = cache_get_or_build(cache, key, &b, &value, err);

    fill(bytes, sizeof bytes, job->n);
    if (r >= 0 && (value.len != sizeof bytes || memcmp(value.data, bytes, sizeof bytes)))
        return -EILSEQ;
    return r;
}

static void wait_for(atomic_int *value, int at_least)
{
    for (int i = 0; i < 20000 && atomic_load(value) < at_least; i++)
        usleep(500);
    assert_true(atomic_load(value) >= at_least);
}

/* Opens at the same moment as the others. */
static struct cache *open_together(struct fixture *f, int n)
{
    atomic_fetch_add(&f->shared->started, 1);
    while (atomic_load(&f->shared->started) < n)
        ;
    return must_open(f->dir, NULL);
}

static void test_open_race(void **state)
{
    struct fixture *f = *state;
    pid_t pids[PROCESSES];

    for (unsigned p = 0; p < PROCESSES; p++) {
        pids[p] = fork();
        if (pids[p])
            continue;
        struct cache *cache = open_together(f, PROCESSES);
        int bad = 0;
        for (unsigned i = 0; i < 10; i++) {
            bad |= put_n(cache, "s", p * 100 + i, 5000, NULL) != 0;
            cache_close(cache);
            cache = must_open(f->dir, NULL);
            bad |= get_n(cache, "s", p * 100 + i, 5000, NULL) != 0;
        }
        cache_close(cache);
        _exit(bad);
    }
    for (unsigned p = 0; p < PROCESSES; p++)
        assert_int_equal(child_wait(pids[p]), 0);
    struct cache *cache = must_open(f->dir, NULL);
    struct cache_verify_result verify;
    assert_int_equal(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE, 0);
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_int_equal(verify.checked, PROCESSES * 10);
    assert_int_equal(verify.damaged, 0);
    cache_close(cache);
}

static void test_race(void **state)
{
    struct fixture *f = *state;
    pid_t pids[PROCESSES];

    for (unsigned p = 0; p < PROCESSES; p++) {
        pids[p] = fork();
        if (pids[p])
            continue;
        struct cache *cache = open_together(f, PROCESSES);
        int bad = 0;
        for (unsigned i = 0; i < KEYS; i++) {
            struct job job = {f->shared, (i + p / 2 * 5) % KEYS, 3, 0};
            struct error err;
            int r = run_job(cache, &job, 20000, NULL, &err);
            if (r < 0 || r == CACHE_UNSTORED)
                fprintf(stderr, "%d %s\n", r, err.text);
            bad |= r < 0 || r == CACHE_UNSTORED;
        }
        cache_close(cache);
        _exit(bad);
    }
    for (unsigned p = 0; p < PROCESSES; p++)
        assert_int_equal(child_wait(pids[p]), 0);
    for (unsigned i = 0; i < KEYS; i++)
        assert_int_equal(atomic_load(&f->shared->builds[i]), 1);
    assert_int_equal(atomic_load(&f->shared->overlap), 0);
}

/* Stopped anywhere, for as long as it takes the others to pass it by: still one build a key. */
static void test_stopped_processes_build_once(void **state)
{
    struct fixture *f = *state;
    pid_t pids[PROCESSES];
    unsigned seed = 1, alive = PROCESSES;
    int status;

    for (unsigned p = 0; p < PROCESSES; p++) {
        pids[p] = fork();
        if (pids[p])
            continue;
        struct cache *cache = open_together(f, PROCESSES);
        int bad = 0;
        for (unsigned i = 0; i < KEYS; i++) {
            struct job job = {f->shared, i, 2, 0};
            bad |= run_job(cache, &job, 60000, NULL, NULL) < 0;
        }
        cache_close(cache);
        _exit(bad);
    }
    wait_for(&f->shared->started, PROCESSES);
    while (alive) {
        unsigned p = (seed = seed * 1103515245u + 12345u) >> 16 & (PROCESSES - 1);
        if (!pids[p])
            continue;
        kill(pids[p], SIGSTOP);
        usleep(10000);
        kill(pids[p], SIGCONT);
        if (waitpid(pids[p], &status, WNOHANG) != pids[p])
            continue;
        assert_int_equal(status, 0);
        pids[p] = 0;
        alive--;
    }
    for (unsigned i = 0; i < KEYS; i++)
        assert_int_equal(atomic_load(&f->shared->builds[i]), 1);
    assert_int_equal(atomic_load(&f->shared->overlap), 0);
}

/* One process's map is small while another grows the file far beyond it. */
static void test_growth_elsewhere(void **state)
{
    struct fixture *f = *state;
    struct cache_options o = {.limit = 16 * MIB, .initial = 128 * KIB};
    struct cache *cache = must_open(f->dir, &o);

    assert_int_equal(put_n(cache, "s", 0, 1000, NULL), 0);
    pid_t pid = fork();
    if (!pid) {
        /* the parent's environment stays untouched: this opens its own */
        struct cache *own = must_open(f->dir, &o);
        int bad = 0;
        for (unsigned n = 1; n < 60; n++)
            bad |= put_n(own, "s", n, 100 * KIB, NULL) != 0;
        cache_close(own);
        _exit(bad);
    }
    assert_int_equal(child_wait(pid), 0);
    for (unsigned n = 1; n < 60; n++)
        assert_int_equal(get_n(cache, "s", n, 100 * KIB, NULL), 0);
    assert_int_equal(put_n(cache, "s", 70, 100 * KIB, NULL), 0);
    cache_close(cache);
}

/* The builder is killed in mid-build: one of those who wait takes over, all get the value. */
static void test_builder_killed(void **state)
{
    struct fixture *f = *state;
    pid_t builder = fork(), pids[WAITERS];

    if (!builder) {
        struct job job = {f->shared, 0, 60000, 0};
        run_job(must_open(f->dir, NULL), &job, 1000, NULL, NULL);
        _exit(99);
    }
    wait_for(&f->shared->building, 1);
    for (unsigned p = 0; p < WAITERS; p++) {
        pids[p] = fork();
        if (pids[p])
            continue;
        struct job job = {f->shared, 0, 100, 0};
        struct cache *cache = must_open(f->dir, NULL);
        int r = run_job(cache, &job, 20000, note_wait, NULL);
        cache_close(cache);
        _exit(r == 0 ? 0 : r == CACHE_BUILT ? 1 : 2);
    }
    wait_for(&f->shared->waits, WAITERS);
    assert_int_equal(atomic_load(&f->shared->told_pid), builder);
    atomic_store(&f->shared->in_build[0], 0); /* the killed one will not count itself out */
    uint64_t start = clock_ns();
    assert_int_equal(kill(builder, SIGKILL), 0);
    assert_int_equal(child_wait(builder), 128 + SIGKILL);
    int built = 0;
    for (unsigned p = 0; p < WAITERS; p++) {
        int status = child_wait(pids[p]);
        assert_in_range(status, 0, 1);
        built += status;
    }
    assert_true(clock_ms_since(start) < 3000);
    assert_int_equal(built, 1);
    assert_int_equal(atomic_load(&f->shared->builds[0]), 2);
    assert_int_equal(atomic_load(&f->shared->overlap), 0);
}

/* The same between build and store, by the fault point; nothing half-stored is seen. */
static void test_killed_before_store(void **state)
{
    struct fixture *f = *state;
    struct job job = {f->shared, 0, 1, 0};
    pid_t pid = fork();

    if (!pid) {
        setenv("EMBER_FAULT", "compile-mid:1=kill", 1);
        fault_init();
        run_job(must_open(f->dir, NULL), &job, 1000, NULL, NULL);
        _exit(99);
    }
    assert_int_equal(child_wait(pid), 128 + SIGKILL);
    struct cache *cache = must_open(f->dir, NULL);
    assert_int_equal(run_job(cache, &job, 0, NULL, NULL), CACHE_BUILT);
    assert_int_equal(run_job(cache, &job, 0, NULL, NULL), 0);
    cache_close(cache);
}

/* Killed at random points of storing: whatever is there afterwards is whole. */
static void test_writer_killed(void **state)
{
    struct fixture *f = *state;

    for (unsigned round = 0; round < 20; round++) {
        pid_t pid = fork();
        if (!pid) {
            struct cache *cache = must_open(f->dir, NULL);
            for (unsigned n = 0;; n++)
                put_n(cache, "s", round * 1000 + n % 50, 30000, NULL);
        }
        usleep(2000 + round * 1500);
        kill(pid, SIGKILL);
        assert_int_equal(child_wait(pid), 128 + SIGKILL);
    }
    struct cache *cache = must_open(f->dir, NULL);
    struct cache_verify_result verify;
    assert_int_equal(cache_warnings(cache, NULL) & CACHE_WARN_ASIDE, 0);
    assert_int_equal(cache_verify(cache, &verify, NULL), 0);
    assert_true(verify.checked > 0);
    assert_int_equal(verify.damaged, 0);
    assert_int_equal(put_n(cache, "s", 1, 30000, NULL), 0);
    cache_close(cache);
}

static void test_bounded_wait(void **state)
{
    struct fixture *f = *state;
    struct error err;
    pid_t builder = fork();

    if (!builder) {
        struct job job = {f->shared, 0, 60000, 0};
        run_job(must_open(f->dir, NULL), &job, 1000, NULL, NULL);
        _exit(99);
    }
    wait_for(&f->shared->building, 1);
    struct cache *cache = must_open(f->dir, NULL);
    struct job job = {f->shared, 0, 1, 0};
    uint64_t start = clock_ns();
    assert_int_equal(run_job(cache, &job, 200, NULL, &err), -ETIMEDOUT);
    assert_in_range((uint64_t)clock_ms_since(start), 190, 2000);
    _cleanup_free_ char *who = x_printf("pid %d builds it", (int)builder);
    assert_non_null(strstr(err.text, who));
    assert_int_equal(run_job(cache, &job, 20000, give_up, &err), -ECANCELED);
    assert_int_equal(run_job(cache, &job, 0, NULL, &err), -ETIMEDOUT);
    struct cache_stats stats;
    assert_int_equal(cache_stats(cache, &stats, NULL), 0);
    assert_int_equal(stats.wait_timeouts, 2);
    struct job other = {f->shared, 1, 1, 0}; /* other keys are free meanwhile */
    assert_int_equal(run_job(cache, &other, 0, NULL, &err), CACHE_BUILT);
    kill(builder, SIGKILL);
    child_wait(builder);
    assert_int_equal(run_job(cache, &job, 1000, NULL, &err), CACHE_BUILT);
    cache_close(cache);
}

/* A child that the builder forked and that lives on must not hold the key. */
static void test_lock_not_inherited(void **state)
{
    struct fixture *f = *state;
    int pipe_fds[2];
    char byte;

    assert_int_equal(pipe(pipe_fds), 0);
    pid_t builder = fork();
    if (!builder) {
        struct job job = {f->shared, 0, 60000, 0};
        struct cache *cache = must_open(f->dir, NULL);
        pid_t child = fork(); /* shares every descriptor */
        if (!child) {
            close(pipe_fds[1]);
            _exit(read(pipe_fds[0], &byte, 1) < 0); /* until the test ends */
        }
        run_job(cache, &job, 1000, NULL, NULL);
        _exit(99);
    }
    wait_for(&f->shared->building, 1);
    kill(builder, SIGKILL);
    child_wait(builder);
    struct cache *cache = must_open(f->dir, NULL);
    struct job job = {f->shared, 0, 1, 0};
    assert_int_equal(run_job(cache, &job, 1000, NULL, NULL), CACHE_BUILT);
    cache_close(cache);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
}

/* ---- Threads ---- */

struct thread {
    struct cache *cache;
    struct job job;
    pthread_t id;
    int result;
    struct error err;
};

static void *thread_main(void *arg)
{
    struct thread *t = arg;

    t->result = run_job(t->cache, &t->job, 20000, NULL, &t->err);
    return NULL;
}

static void run_threads(struct fixture *f, struct cache *cache, struct thread *threads, int n,
                        int fail)
{
    for (int i = 0; i < n; i++) {
        threads[i] =
            (struct thread){.cache = cache, .job = {f->shared, 0, 200, fail ? fail + i : 0}};
        assert_int_equal(pthread_create(&threads[i].id, NULL, thread_main, &threads[i]), 0);
    }
    for (int i = 0; i < n; i++)
        assert_int_equal(pthread_join(threads[i].id, NULL), 0);
}

static void test_threads(void **state)
{
    struct fixture *f = *state;
    struct cache *cache = must_open(f->dir, NULL);
    struct thread threads[8];
    int built = 0;

    run_threads(f, cache, threads, 8, 0);
    for (int i = 0; i < 8; i++) {
        assert_in_range(threads[i].result, 0, CACHE_BUILT);
        built += threads[i].result == CACHE_BUILT;
    }
    assert_int_equal(built, 1);
    assert_int_equal(atomic_load(&f->shared->builds[0]), 1);
    cache_close(cache);
}

/* A failed build: those who waited get the first error, nothing is stored, the next try builds. */
static void test_failed_build(void **state)
{
    struct fixture *f = *state;
    struct cache *cache = must_open(f->dir, NULL);
    struct thread threads[8];
    struct cache_stats stats;

    run_threads(f, cache, threads, 8, 40);
    int builds = atomic_load(&f->shared->builds[0]);
    assert_in_range(builds, 1, 7); /* a late thread may find nobody at work and try itself */
    for (int i = 0; i < 8; i++) {
        _cleanup_free_ char *text = x_printf("error %d of the compiler", -threads[i].result);
        assert_true(threads[i].result < 0);
        assert_string_equal(threads[i].err.text, text);
        assert_int_equal(threads[i].err.code, threads[i].result);
    }
    assert_int_equal(cache_stats(cache, &stats, NULL), 0);
    assert_int_equal(stats.entries, 0);
    assert_int_equal(stats.build_errors, builds);
    struct job good = {f->shared, 0, 1, 0};
    assert_int_equal(run_job(cache, &good, 0, NULL, NULL), CACHE_BUILT);
    cache_close(cache);
}

/* Nothing can be stored: the waiting threads still get the one builder's value. */
static void test_unstored_shared(void **state)
{
    struct fixture *f = *state;
    struct cache *cache = must_open(f->dir, NULL);
    struct thread threads[8];

    setenv("EMBER_FAULT", "cache-full:0", 1);
    fault_init();
    run_threads(f, cache, threads, 8, 0);
    for (int i = 0; i < 8; i++)
        assert_int_equal(threads[i].result, CACHE_UNSTORED);
    assert_in_range(atomic_load(&f->shared->builds[0]), 1, 2);
    assert_int_equal(atomic_load(&f->shared->overlap), 0);
    cache_close(cache);
}

/* Growing the map while other threads read and write. */
static void *churn_main(void *arg)
{
    struct thread *t = arg;

    for (unsigned n = 0; n < 60 && !t->result; n++) {
        unsigned id = t->job.n * 1000 + n;
        t->result = put_n(t->cache, "c", id, 20 * KIB, &t->err);
        int r = t->result ? 0 : get_n(t->cache, "c", id, 20 * KIB, &t->err);
        if (r < 0)
            t->result = r;
    }
    return NULL;
}

static void test_threads_grow(void **state)
{
    struct fixture *f = *state;
    struct cache *cache =
        must_open(f->dir, &(struct cache_options){.limit = 3 * MIB, .initial = 128 * KIB});
    struct thread threads[6];

    for (unsigned i = 0; i < 6; i++) {
        threads[i] = (struct thread){.cache = cache, .job = {.n = i}};
        assert_int_equal(pthread_create(&threads[i].id, NULL, churn_main, &threads[i]), 0);
    }
    for (int i = 0; i < 6; i++) {
        assert_int_equal(pthread_join(threads[i].id, NULL), 0);
        if (threads[i].result)
            print_message("%s\n", threads[i].err.text);
        assert_int_equal(threads[i].result, 0);
    }
    struct cache_stats stats;
    assert_int_equal(cache_stats(cache, &stats, NULL), 0);
    assert_true(stats.grown > 0 && stats.evicted > 0);
    cache_close(cache);
}

int main(int argc, char **argv)
{
    damage_main(argc, argv);
#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_open_race),
        TEST(test_race),
        TEST(test_stopped_processes_build_once),
        TEST(test_growth_elsewhere),
        TEST(test_builder_killed),
        TEST(test_killed_before_store),
        TEST(test_writer_killed),
        TEST(test_bounded_wait),
        TEST(test_lock_not_inherited),
        TEST(test_threads),
        TEST(test_failed_build),
        TEST(test_unstored_shared),
        TEST(test_threads_grow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
