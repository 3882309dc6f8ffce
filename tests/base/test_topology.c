/* SPDX-License-Identifier: Apache-2.0 */
/* Places of threads and memory on made-up machines; binding and memory policies on this one. */
#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fd.h"
#include "base/topology.h"

/* ---- made-up machines ---- */

struct machine {
    const char *online, *allowed, *memory_allowed; /* CPUs, CPUs, nodes */
    const char *nodes, *has_memory;                /* NULL: a kernel without nodes */
    const char *cpus[8];                           /* of node 0, 1, ...; NULL: no such node */
    const char *cores[32];                         /* CPUs of a core; each CPU's file is written */
};

static char root[] = "/tmp/ember-topology-XXXXXX";

static void put(const char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void put(const char *text, const char *format, ...)
{
    char name[128];
    va_list ap;

    va_start(ap, format);
    vsnprintf(name, sizeof name, format, ap);
    va_end(ap);
    _cleanup_free_ char *path = x_printf("%s/%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    _cleanup_fd_ int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_int_equal(fd_write_all(fd, text, strlen(text), path, NULL), 0);
}

static void clear(void)
{
    _cleanup_free_ char *rm = x_printf("rm -rf %s/*", root);

    assert_int_equal(system(rm), 0);
}

static struct topology *make(const struct machine *m)
{
    _cleanup_free_ char *status = x_printf("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t%s\n"
                                           "Mems_allowed:\t1\nMems_allowed_list:\t%s\nx:\t0\n",
                                           m->allowed, m->memory_allowed);
    _cleanup_free_ char *status_path = x_printf("%s/status", root);
    struct id_set core;

    clear();
    put(status, "status");
    put(m->online, "cpu/online");
    put(m->cores[0] ? "1\n" : "0\n", "cpu/smt/active");
    for (size_t i = 0; i < ARRAY_LEN(m->cores) && m->cores[i]; i++) {
        assert_true(id_set_parse(m->cores[i], &core));
        for (uint32_t cpu = 0; cpu < 64; cpu++)
            if (id_set_has(&core, cpu))
                put(m->cores[i], "cpu/cpu%u/topology/thread_siblings_list", cpu);
    }
    if (m->nodes) {
        put(m->nodes, "node/online");
        put(m->has_memory, "node/has_memory");
    }
    for (size_t i = 0; i < ARRAY_LEN(m->cpus); i++)
        if (m->cpus[i])
            put(m->cpus[i], "node/node%zu/cpulist", i);
    return topology_read(root, status_path);
}

static void write_set(const struct id_set *set, char *to)
{
    for (uint32_t id = 0; id < ID_SET_MAX; id++)
        if (id_set_has(set, id))
            to += sprintf(to, "%s%u", to[-1] == ' ' ? "" : ",", id);
}

/* Threads' CPUs in order, then the memory: "0 1 m0,1"; a thread that may go anywhere is nothing. */
static const char *placed(const struct machine *m, uint32_t threads, uint32_t place,
                          enum topology_pin pin, bool shared)
{
    static char text[4096];
    _cleanup_(topology_freep) struct topology *t = make(m);
    struct placement_options options = {threads, place, pin, shared};
    struct placement p;

    memset(text, 0, sizeof text);
    assert_non_null(t);
    placement_choose(t, &options, &p);
    assert_int_equal(p.n_threads, threads);
    for (uint32_t i = 0; p.threads && i < threads; i++) {
        strcat(text, " ");
        write_set(&p.threads[i], text + strlen(text));
    }
    strcat(text, " m ");
    write_set(&p.memory, text + strlen(text));
    placement_clear(&p);
    return text + 1;
}

#define ALWAYS TOPOLOGY_PIN_ALWAYS
#define AUTO TOPOLOGY_PIN_AUTO
#define NEVER TOPOLOGY_PIN_NEVER

static const struct machine flat = {"0-3", "0-3", "0", "0", "0", {"0-3"}, {NULL}};
static const struct machine two = {"0-7", "0-7", "0-1", "0-1", "0-1", {"0-3", "4-7"}, {NULL}};

static void test_one_node(void **ctx)
{
    assert_string_equal(placed(&flat, 2, 0, AUTO, false), "0 1 m ");
    assert_string_equal(placed(&flat, 2, 1, AUTO, false), "2 3 m ");
    /* No more CPUs that nobody has: left to the kernel, unless that is what is wanted. */
    assert_string_equal(placed(&flat, 2, 2, AUTO, false), "m ");
    assert_string_equal(placed(&flat, 2, 2, ALWAYS, false), "0 1 m ");
    assert_string_equal(placed(&flat, 3, 1, ALWAYS, false), "3 0 1 m ");
    assert_string_equal(placed(&flat, 4, 0, AUTO, false), "0 1 2 3 m ");
    assert_string_equal(placed(&flat, 4, 1, AUTO, false), "m ");
    assert_string_equal(placed(&flat, 6, 0, AUTO, false), "m ");
    assert_string_equal(placed(&flat, 6, 0, ALWAYS, false), "0 1 2 3 0 1 m ");
    /* Under a quota others run there, too. */
    assert_string_equal(placed(&flat, 2, 0, AUTO, true), "m ");
    assert_string_equal(placed(&flat, 2, 0, ALWAYS, true), "0 1 m ");
    assert_string_equal(placed(&flat, 2, 0, NEVER, false), "m ");
}

static void test_two_nodes(void **ctx)
{
    /* Few threads: one node, in turn; its memory. */
    assert_string_equal(placed(&two, 2, 0, AUTO, false), "0 1 m 0");
    assert_string_equal(placed(&two, 2, 1, AUTO, false), "4 5 m 1");
    assert_string_equal(placed(&two, 2, 2, AUTO, false), "2 3 m 0");
    assert_string_equal(placed(&two, 2, 3, AUTO, false), "6 7 m 1");
    assert_string_equal(placed(&two, 2, 4, AUTO, false), "0,1,2,3 0,1,2,3 m 0");
    assert_string_equal(placed(&two, 2, 5, ALWAYS, false), "4 5 m 1");
    /* Many: spread evenly over both. */
    assert_string_equal(placed(&two, 6, 0, AUTO, false), "0 1 2 4 5 6 m 0,1");
    assert_string_equal(placed(&two, 8, 0, AUTO, false), "0 1 2 3 4 5 6 7 m 0,1");
    assert_string_equal(placed(&two, 5, 1, AUTO, false),
                        "0,1,2,3 0,1,2,3 4,5,6,7 4,5,6,7 4,5,6,7 m 0,1");
    assert_string_equal(placed(&two, 6, 0, AUTO, true), "m ");
    assert_string_equal(placed(&two, 6, 0, NEVER, false), "m ");
}

static void test_four_nodes(void **ctx)
{
    /* With a hole in the numbers, one node without memory, one without CPUs. */
    const struct machine m = {"0-11",    "0-11",  "0-5",
                              "0,2-3,5", "0,2,5", {"0-3", NULL, "4-7", "8-11", NULL, "\n"},
                              {NULL}};

    assert_string_equal(placed(&m, 4, 0, AUTO, false), "0 1 2 3 m 0");
    assert_string_equal(placed(&m, 4, 1, AUTO, false), "4 5 6 7 m 2");
    assert_string_equal(placed(&m, 4, 2, AUTO, false),
                        "8 9 10 11 m "); /* its nearest: the kernel's */
    assert_string_equal(placed(&m, 6, 0, AUTO, false), "0 1 2 4 5 6 m 0,2");
    assert_string_equal(placed(&m, 6, 1, ALWAYS, false), "8 9 10 3 0 1 m 0");
    assert_string_equal(placed(&m, 12, 0, AUTO, false), "0 1 2 3 4 5 6 7 8 9 10 11 m 0,2");
    _cleanup_(topology_freep) struct topology *t = make(&m);
    assert_int_equal(id_set_count(topology_memory(t)), 3);
    assert_true(id_set_has(topology_memory(t), 5)); /* memory alone takes weights */
}

static void test_unequal_nodes(void **ctx)
{
    const struct machine m = {"0-8", "0-8", "0-1", "0-1", "0-1", {"0-5", "6-8"}, {NULL}};

    assert_string_equal(placed(&m, 6, 0, AUTO, false), "0 1 2 3 4 5 m 0");
    assert_string_equal(placed(&m, 3, 1, AUTO, false), "6 7 8 m 1");
    assert_string_equal(placed(&m, 7, 0, AUTO, false), "0 1 2 3 6 7 8 m 0,1");
    assert_string_equal(placed(&m, 9, 0, AUTO, false), "0 1 2 3 4 5 6 7 8 m 0,1");
}

static void test_cores_first(void **ctx)
{
    const struct machine m = {
        "0-7", "0-7", "0-1", "0-1", "0-1", {"0-1,4-5", "2-3,6-7"}, {"0,4", "1,5", "2,6", "3,7"}};
    const struct machine neighbours = {"0-3", "0-3", "0", "0", "0", {"0-3"}, {"0-1", "2-3"}};

    assert_string_equal(placed(&m, 2, 0, AUTO, false), "0 1 m 0");
    assert_string_equal(placed(&m, 3, 0, AUTO, false), "0 1 4 m 0");
    assert_string_equal(placed(&m, 2, 2, AUTO, false), "4 5 m 0");
    assert_string_equal(placed(&neighbours, 2, 0, AUTO, false), "0 2 m ");
    assert_string_equal(placed(&neighbours, 3, 0, AUTO, false), "0 2 1 m ");
    assert_string_equal(placed(&neighbours, 4, 0, AUTO, false), "0 1 2 3 m "); /* all: any order */
}

static void test_what_is_allowed(void **ctx)
{
    /* A cpuset of one node; CPU 5 is offline though it is allowed. */
    struct machine m = two;
    m.allowed = "4-7";
    m.memory_allowed = "1";
    m.online = "0-4,6-7";
    assert_string_equal(placed(&m, 3, 0, AUTO, false), "4 6 7 m "); /* one memory: no policy */
    assert_string_equal(placed(&m, 1, 1, AUTO, false), "6 m ");
    _cleanup_(topology_freep) struct topology *t = make(&m);
    assert_int_equal(id_set_count(topology_cpus(t)), 3);
    assert_int_equal(id_set_count(topology_memory(t)), 1);
    /* CPUs of both nodes, memory of one. */
    m.allowed = "2-5";
    assert_string_equal(placed(&m, 3, 0, AUTO, false), "2 3 4 m ");
    /* Nodes are not known, nor numbers that a list can hold. */
    m = flat;
    m.nodes = NULL;
    m.cpus[0] = NULL;
    assert_string_equal(placed(&m, 2, 1, AUTO, false), "2 3 m ");
    m.allowed = "5000-6000";
    assert_string_equal(placed(&m, 2, 0, ALWAYS, false), "m ");
    m.allowed = "everything";
    assert_string_equal(placed(&m, 2, 0, AUTO, false), "0 1 m ");
    m.online = "?";
    assert_string_equal(placed(&m, 2, 0, ALWAYS, false), "m ");
}

static void test_lists(void **ctx)
{
    struct id_set set = {{7}};

    assert_false(id_set_parse("1-", &set));
    assert_false(id_set_parse("a", &set));
    assert_false(id_set_parse("1;2", &set));
    assert_false(id_set_parse("-3", &set));
    assert_int_equal(set.bits[0], 7);
    assert_true(id_set_parse("0-3,8,10-11,1023,4096\n", &set));
    assert_int_equal(set.bits[0], 0xd0f);
    assert_int_equal(id_set_count(&set), 8);
    assert_true(id_set_parse("\n", &set));
    assert_int_equal(id_set_count(&set), 0);
}

/* ---- this machine ---- */

static void *count_after_unbind(void *ctx)
{
    cpu_set_t now;

    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    ((int *)ctx)[0] = CPU_COUNT(&now);
    cpus_unbind();
    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    ((int *)ctx)[1] = CPU_COUNT(&now);
    return NULL;
}

static void test_binding(void **ctx)
{
    struct id_set one = {0}, none = {0}, before;
    cpu_set_t all, now;
    pthread_t thread;
    int counts[2];

    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    assert_false(cpus_unbound(&before));
    for (uint32_t cpu = 0; !id_set_count(&one); cpu++)
        if (CPU_ISSET(cpu, &all))
            id_set_add(&one, cpu);
    assert_false(cpus_bind(&none)); /* refused; what we had is known from here on */
    assert_true(cpus_bind(&one));
    assert_true(cpus_unbound(&before));
    assert_int_equal(id_set_count(&before), CPU_COUNT(&all));
    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    assert_int_equal(CPU_COUNT(&now), 1);
    _cleanup_(topology_freep) struct topology *t = topology_host(); /* not of the one CPU */
    assert_int_equal(id_set_count(topology_cpus(t)), CPU_COUNT(&all));
    assert_int_equal(pthread_create(&thread, NULL, count_after_unbind, counts), 0);
    pthread_join(thread, NULL);
    assert_int_equal(counts[0], 1);
    assert_int_equal(counts[1], CPU_COUNT(&all));
    cpus_unbind();
    assert_int_equal(sched_getaffinity(0, sizeof now, &now), 0);
    assert_true(CPU_EQUAL(&now, &all));
}

static int policy_of(void *at)
{
    int mode = -1;

    return syscall(SYS_get_mempolicy, &mode, NULL, 0, at, MPOL_F_ADDR) < 0 ? -errno : mode;
}

static void test_memory(void **ctx)
{
    _cleanup_(topology_freep) struct topology *t = topology_host();
    struct id_set none = {0}, node = {0}, nobody = {0};
    void *at = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_ptr_not_equal(at, MAP_FAILED);
    if (policy_of(at) < 0 || !id_set_count(topology_memory(t))) {
        munmap(at, MIB);
        print_message("no memory policies here\n");
        skip();
    }
    assert_int_equal(memory_spread(at, MIB, &none), 0);
    assert_int_equal(policy_of(at), MPOL_DEFAULT);
    for (uint32_t id = 0; id < ID_SET_MAX && !id_set_count(&node); id++)
        if (id_set_has(topology_memory(t), id))
            id_set_add(&node, id);
    assert_int_equal(memory_spread(at, MIB, &node), 0);
    assert_int_equal(policy_of(at), MPOL_PREFERRED);
    id_set_add(&nobody, ID_SET_MAX - 1); /* no such node */
    assert_int_equal(memory_spread(at, MIB, &nobody), -EINVAL);
    memset(at, 1, MIB); /* it is memory all the same */
    memory_interleave(at, MIB);
    assert_int_equal(policy_of(at),
                     id_set_count(topology_memory(t)) > 1 ? MPOL_INTERLEAVE : MPOL_PREFERRED);
    munmap(at, MIB);
}

static int begin(void **ctx)
{
    return mkdtemp(root) ? 0 : -1;
}

static int end(void **ctx)
{
    clear();
    return rmdir(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_node),    cmocka_unit_test(test_two_nodes),
        cmocka_unit_test(test_four_nodes),  cmocka_unit_test(test_unequal_nodes),
        cmocka_unit_test(test_cores_first), cmocka_unit_test(test_what_is_allowed),
        cmocka_unit_test(test_lists),       cmocka_unit_test(test_binding),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
