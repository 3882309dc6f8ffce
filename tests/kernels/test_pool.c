/* SPDX-License-Identifier: Apache-2.0 */
/* The pool: every block exactly once and in launch order; threads start late, sleep when idle,
 * wake. */
#include <fcntl.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/fd.h"
#include "kernels/cpu/limit.h"
#include "kernels/cpu/pool.h"

#define LAUNCHES 40
#define BLOCKS 97

struct trace {
    _Atomic uint32_t hits[LAUNCHES][BLOCKS];
    _Atomic uint32_t finished[LAUNCHES]; /* blocks done of each launch */
    uint32_t want[LAUNCHES];
    _Atomic uint32_t out_of_order;
    uint32_t plain[LAUNCHES]; /* written without atomics by the first block: launches order it */
};

static void body(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    struct trace *t = (struct trace *)(uintptr_t)args[0];
    uint64_t i = args[1];

    if (i && (atomic_load(&t->finished[i - 1]) != t->want[i - 1] || t->plain[i - 1] != i))
        atomic_fetch_add(&t->out_of_order, 1);
    if (block == n_blocks - 1)
        t->plain[i] = (uint32_t)i + 1;
    atomic_fetch_add(&t->hits[i][block], 1);
    atomic_fetch_add(&t->finished[i], 1);
}

static void run_traced(struct pool *pool, uint32_t seed)
{
    struct trace *t = x_alloc(sizeof *t);
    struct pool_launch list[LAUNCHES];
    uint64_t args[LAUNCHES][2];

    for (uint32_t i = 0; i < LAUNCHES; i++) {
        t->want[i] = (i + seed) % 3 == 0 ? 1 : 1 + (i * 7919 + seed * 31) % BLOCKS;
        args[i][0] = (uintptr_t)t;
        args[i][1] = i;
        list[i] = (struct pool_launch){body, args[i], t->want[i]};
    }
    pool_run(pool, list, LAUNCHES);
    assert_int_equal(t->out_of_order, 0);
    for (uint32_t i = 0; i < LAUNCHES; i++)
        for (uint32_t b = 0; b < BLOCKS; b++)
            assert_int_equal(t->hits[i][b], b < t->want[i]);
    free(t);
}

static void test_every_block_once(void **ctx)
{
    const uint32_t counts[] = {1, 2, 3, 16}; /* 16: more than there are processors on most hosts */

    for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
        _cleanup_(pool_freep) struct pool *pool = pool_new(counts[i]);
        assert_int_equal(pool_threads(pool), counts[i]);
        for (uint32_t run = 0; run < 100; run++)
            run_traced(pool, run);
        assert_int_equal(pool_started(pool), counts[i] - 1);
    }
}

static void nothing(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
}

static void test_starts_late(void **ctx)
{
    _cleanup_(pool_freep) struct pool *pool = pool_new(4);
    struct pool_launch one[2] = {{nothing, NULL, 1}, {nothing, NULL, 0}};
    struct pool_launch many = {nothing, NULL, 8};

    pool_run(pool, NULL, 0);
    pool_run(pool, one, 2);
    assert_int_equal(pool_started(pool), 0);
    pool_run(pool, &many, 1);
    assert_int_equal(pool_started(pool), 3);
}

static uint64_t cpu_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void wait_asleep(struct pool *pool, uint32_t n)
{
    for (int i = 0; i < 5000 && pool_asleep(pool) != n; i++)
        usleep(1000);
    assert_int_equal(pool_asleep(pool), n);
}

static void test_parks_and_wakes(void **ctx)
{
    _cleanup_(pool_freep) struct pool *pool = pool_new(3);

    run_traced(pool, 0);
    wait_asleep(pool, 2);
    uint64_t before = cpu_ns();
    usleep(50000);
    assert_true(cpu_ns() - before <
                5000000); /* asleep, not spinning: a spin would be 50 ms or more */
    for (uint32_t i = 0; i < 20; i++) {
        wait_asleep(pool, 2);
        run_traced(pool, i);
    }
}

/* The spin follows what wakes take, and stays within its bounds. */
static void test_spin_is_measured(void **ctx)
{
    _cleanup_(pool_freep) struct pool *pool = pool_new(3);
    uint32_t before = pool_spin_ns(pool);
    bool moved = false;

    /* Who is woken counts as asleep until a processor is free for it: a busy machine takes longer.
     */
    for (uint32_t i = 0; i < 20 || (i < 5000 && !moved); i++) {
        run_traced(pool, i);
        usleep(i < 20 ? 0 : 1000);
        wait_asleep(pool, 2);
        moved |= pool_spin_ns(pool) != before;
        assert_in_range(pool_spin_ns(pool), POOL_SPIN_LEAST_NS, POOL_SPIN_MOST_NS);
    }
    assert_true(moved);
}

/* Two processors of many: affinity is what counts. */
static void test_affinity_limits_threads(void **ctx)
{
    cpu_set_t all, one;

    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all) && !CPU_COUNT(&one))
            CPU_SET(i, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    uint32_t limit = cpu_limit();
    _cleanup_(pool_freep) struct pool *pool = pool_new(0);
    uint32_t threads = pool_threads(pool);
    assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    assert_int_equal(limit, 1);
    assert_int_equal(threads, 1);
}

/* Up to 16 blocks a grain each, then a quarter as many up to 64; some for each of many threads. */
static void test_blocks_of_grains(void **ctx)
{
    static const struct {
        uint32_t threads, grains, blocks;
    } cases[] = {
        {2, 0, 0},     {2, 1, 1},      {2, 16, 16},    {2, 24, 16},     {2, 100, 25},
        {2, 4096, 64}, {48, 100, 100}, {48, 500, 192}, {48, 4096, 192}, {16, 200, 64},
    };

    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        _cleanup_(pool_freep) struct pool *pool = pool_new(cases[i].threads);
        assert_int_equal(pool_blocks(pool, cases[i].grains), cases[i].blocks);
    }
}

static _Atomic uint32_t astray;
static void stay(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    const struct id_set *places = (const struct id_set *)(uintptr_t)args[0];
    cpu_set_t mine;

    if (sched_getaffinity(0, sizeof mine, &mine) || CPU_COUNT(&mine) != 1 ||
        !CPU_ISSET(sched_getcpu(), &mine) || !id_set_has(places, (uint32_t)sched_getcpu()))
        atomic_fetch_add(&astray, 1);
    usleep(1000);
}

static void test_threads_keep_their_places(void **ctx)
{
    _cleanup_(topology_freep) struct topology *topology = topology_host();
    uint32_t limit = cpu_limit();
    cpu_set_t before, after;

    assert_non_null(topology);
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        struct pool *pool = pool_new(threads);
        struct placement_options options = {threads, 0, TOPOLOGY_PIN_ALWAYS, false};
        struct placement where;
        struct id_set all = {0};
        uint64_t args[] = {(uintptr_t)&all};
        struct pool_launch launch = {stay, args, 12};
        placement_choose(topology, &options, &where);
        assert_non_null(where.threads);
        for (uint32_t i = 0; i < threads; i++)
            for (size_t w = 0; w < ARRAY_LEN(all.bits); w++)
                all.bits[w] |= where.threads[i].bits[w];
        pool_place(pool, &where);
        assert_null(where.threads);
        struct pool_launch idle = {nothing, NULL, 12};
        for (int run = 0; run < POOL_UNBOUND_RUNS; run++)
            pool_run(pool, &idle, 1);
        assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
        assert_true(CPU_EQUAL(&before, &after));
        pool_run(pool, &launch, 1);
        pool_run(pool, &launch, 1);
        assert_int_equal(astray, 0);
        assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
        assert_int_equal(CPU_COUNT(&after), 1);
        assert_int_equal(cpu_limit(), limit); /* of the process, not of this thread */
        pool_free(pool);
        assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
        assert_true(CPU_EQUAL(&before, &after));
    }
}

static _Atomic uint32_t met;
static void meet(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    atomic_fetch_add(&met, 1);
    while (atomic_load(&met) < n_blocks) /* returns only if all blocks run at the same time */
        usleep(100);
}

static void test_sleepers_are_woken(void **ctx)
{
    _cleanup_(pool_freep) struct pool *pool = pool_new(3);
    struct pool_launch launch = {meet, NULL, 3};

    for (int i = 0; i < 5; i++) {
        met = 0;
        pool_run(pool, &launch, 1);
        wait_asleep(pool, 2);
    }
}

/* As many as a launch of several blocks has of them in the middle; the others come back. */
static void test_few_blocks_are_for_few_threads(void **ctx)
{
    _cleanup_(pool_freep) struct pool *pool = pool_new(6);
    struct pool_launch few[] = {{nothing, NULL, 2}, {nothing, NULL, 1}, {nothing, NULL, 3}};
    struct pool_launch some[] = {{nothing, NULL, 3}, {nothing, NULL, 1}, {nothing, NULL, 5}};
    struct pool_launch all = {meet, NULL, 6};

    for (int i = 0; i < 20; i++) {
        pool_run(pool, few, 3);
        assert_int_equal(pool_active(pool), 3);
        pool_run(pool, few, 2);
        assert_int_equal(pool_active(pool), 2);
        if (i % 4 == 0)
            wait_asleep(pool, 5);
        met = 0;
        pool_run(pool, &all, 1);
        assert_int_equal(pool_active(pool), 6);
        pool_run(pool, some, 3);
        assert_int_equal(pool_active(pool), 4);
        pool_run(pool, few + 1, 1); /* of no use to more than one: nothing changes */
        assert_int_equal(pool_active(pool), 4);
    }
}

static void pause_a_while(const uint64_t *args, uint32_t block, uint32_t n_blocks)
{
    if (block == n_blocks - 1)
        usleep(2000);
}

static void test_times_are_kept(void **ctx)
{
    struct pool_launch list[] = {
        {nothing, NULL, 1}, {pause_a_while, NULL, 4}, {nothing, NULL, 5}, {pause_a_while, NULL, 1}};

    for (uint32_t threads = 1; threads <= 3; threads++) {
        _cleanup_(pool_freep) struct pool *pool = pool_new(threads);
        uint64_t ns[4] = {0};
        for (uint64_t run = 1; run <= 3; run++) {
            pool_run_timed(pool, list, 4, ns);
            pool_run(pool, list, 4); /* keeps none */
            assert_true(ns[1] >= run * 2000000 && ns[3] >= run * 2000000);
        }
    }
}

static void write_file(const char *dir, const char *name, const char *text)
{
    _cleanup_free_ char *path = x_printf("%s/%s", dir, name);
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_int_equal(fd_write_all(fd, text, strlen(text), path, NULL), 0);
}

static void test_cgroup_limit(void **ctx)
{
    char root[] = "/tmp/ember-cgroup-XXXXXX";
    assert_non_null(mkdtemp(root));
    _cleanup_free_ char *proc = x_printf("%s/proc", root);
    _cleanup_free_ char *a = x_printf("%s/a", root);
    _cleanup_free_ char *b = x_printf("%s/a/b", root);
    _cleanup_free_ char *v1 = x_printf("%s/cpu", root);
    _cleanup_free_ char *v1g = x_printf("%s/cpu/g", root);
    assert_int_equal(mkdir(a, 0700) | mkdir(b, 0700) | mkdir(v1, 0700) | mkdir(v1g, 0700), 0);

    write_file(root, "proc", "0::/a/b\n");
    write_file(b, "cpu.max", "max 100000\n");
    assert_int_equal(cpu_limit_cgroup(proc, root), 0);
    write_file(a, "cpu.max", "350000 100000\n"); /* the parent's counts; rounded down */
    assert_int_equal(cpu_limit_cgroup(proc, root), 3);
    write_file(b, "cpu.max", "20000 100000\n"); /* never below 1 */
    assert_int_equal(cpu_limit_cgroup(proc, root), 1);
    write_file(root, "proc", "0::/gone/there\n");
    assert_int_equal(cpu_limit_cgroup(proc, root), 0);
    write_file(root, "proc", "5:memory:/x\n4:cpuacct,cpu:/g\n");
    write_file(v1g, "cpu.cfs_quota_us", "-1\n");
    write_file(v1g, "cpu.cfs_period_us", "100000\n");
    assert_int_equal(cpu_limit_cgroup(proc, root), 0);
    write_file(v1g, "cpu.cfs_quota_us", "200000\n");
    assert_int_equal(cpu_limit_cgroup(proc, root), 2);
    assert_true(cpu_limit() >= 1);

    _cleanup_free_ char *rm = x_printf("rm -r %s", root);
    assert_int_equal(system(rm), 0);
}

/* Not a check, a number to look at: what a launch costs beyond its work. */
static void test_overhead(void **ctx)
{
    struct pool_launch list[1000];
    const uint32_t shapes[] = {1, 2, 8, 32};

    for (size_t s = 0; s < ARRAY_LEN(shapes); s++) {
        _cleanup_(pool_freep) struct pool *pool = pool_new(2);
        uint64_t best = UINT64_MAX;
        for (size_t i = 0; i < ARRAY_LEN(list); i++)
            list[i] = (struct pool_launch){nothing, NULL, shapes[s]};
        for (int i = 0; i < 20; i++) {
            uint64_t start = clock_ns();
            pool_run(pool, list, ARRAY_LEN(list));
            best = MIN(best, clock_ns() - start);
        }
        print_message("2 threads, %u blocks: %.3f us a launch\n", shapes[s],
                      (double)best / 1e3 / ARRAY_LEN(list));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_block_once),
        cmocka_unit_test(test_starts_late),
        cmocka_unit_test(test_parks_and_wakes),
        cmocka_unit_test(test_sleepers_are_woken),
        cmocka_unit_test(test_spin_is_measured),
        cmocka_unit_test(test_affinity_limits_threads),
        cmocka_unit_test(test_times_are_kept),
        cmocka_unit_test(test_cgroup_limit),
        cmocka_unit_test(test_few_blocks_are_for_few_threads),
        cmocka_unit_test(test_blocks_of_grains),
        cmocka_unit_test(test_threads_keep_their_places),
        cmocka_unit_test(test_overhead),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
