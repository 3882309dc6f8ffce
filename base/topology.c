/* SPDX-License-Identifier: Apache-2.0 */
#include "base/topology.h"

#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/fd.h"

#define SYS "/sys/devices/system"
#define STATUS "/proc/thread-self/status"
#define TEXT_MAX 16384 /* of a file; lists of a thousand numbers and /proc/PID/status fit */

struct node {
    uint32_t id, n_cpus;
    struct id_set cpus; /* for us */
};

struct topology {
    struct id_set cpus, memory;
    struct node nodes[ID_SET_MAX]; /* that have CPUs for us */
    uint32_t n_nodes;
    char *sys; /* where to read which CPUs are one core's, if that is asked */
};

/* ---- sets ---- */

uint32_t id_set_count(const struct id_set *set)
{
    uint32_t n = 0;

    for (size_t i = 0; i < ARRAY_LEN(set->bits); i++)
        n += (uint32_t)__builtin_popcountll(set->bits[i]);
    return n;
}

/* A number at *text, which moves behind it. */
static bool take_number(const char **text, uint64_t *ret)
{
    const char *p = *text;
    uint64_t n = 0;

    for (; *p >= '0' && *p <= '9' && p - *text < 10; p++)
        n = 10 * n + (uint64_t)(*p - '0');
    if (p == *text)
        return false;
    *text = p;
    *ret = n;
    return true;
}

bool id_set_parse(const char *text, struct id_set *ret)
{
    struct id_set set = {0};

    while (*text && *text != '\n') {
        uint64_t first, last;
        if (!take_number(&text, &first))
            return false;
        last = first;
        if (*text == '-' && (text++, !take_number(&text, &last)))
            return false;
        for (uint64_t id = first; id <= last && id < ID_SET_MAX; id++)
            id_set_add(&set, (uint32_t)id);
        if (*text == ',')
            text++;
        else if (*text && *text != '\n')
            return false;
    }
    *ret = set;
    return true;
}

static struct id_set both(const struct id_set *a, const struct id_set *b)
{
    struct id_set set;

    for (size_t i = 0; i < ARRAY_LEN(set.bits); i++)
        set.bits[i] = a->bits[i] & b->bits[i];
    return set;
}

/* Behind the greatest number. */
static uint32_t end_of(const struct id_set *set)
{
    for (size_t i = ARRAY_LEN(set->bits); i; i--)
        if (set->bits[i - 1])
            return (uint32_t)(i * 64) - (uint32_t)__builtin_clzll(set->bits[i - 1]);
    return 0;
}

static struct id_set everything(void)
{
    struct id_set set;

    memset(&set, 0xff, sizeof set);
    return set;
}

/* ---- reading ---- */

static bool read_set(const char *path, struct id_set *ret)
{
    char text[TEXT_MAX];

    return fd_read_pseudo(path, text, sizeof text) >= 0 && id_set_parse(text, ret);
}

static bool read_sys(const char *sys, const char *name, struct id_set *ret)
{
    _cleanup_free_ char *path = x_printf("%s/%s", sys, name);

    return read_set(path, ret);
}

/* What the cpuset and the affinity of this thread allow. */
static void read_allowed(const char *path, struct id_set *cpus, struct id_set *memory)
{
    static const char cpu_key[] = "\nCpus_allowed_list:\t", memory_key[] = "\nMems_allowed_list:\t";
    char text[TEXT_MAX];
    const char *at;

    *cpus = *memory = everything();
    if (fd_read_pseudo(path, text, sizeof text) < 0)
        return;
    if ((at = strstr(text, cpu_key)))
        id_set_parse(at + strlen(cpu_key), cpus);
    if ((at = strstr(text, memory_key)))
        id_set_parse(at + strlen(memory_key), memory);
}

/* Whether cores have several CPUs; kernels before 4.19 do not say. */
static bool has_siblings(const char *sys)
{
    _cleanup_free_ char *path = x_printf("%s/cpu/smt/active", sys);
    char text[16];

    return fd_read_pseudo(path, text, sizeof text) < 0 || *text != '0';
}

static void add_node(struct topology *t, uint32_t id, const struct id_set *cpus)
{
    uint32_t n = id_set_count(cpus);

    if (n)
        t->nodes[t->n_nodes++] = (struct node){id, n, *cpus};
}

/* `unbound`: instead of the CPUs that the status file allows; or NULL. */
static struct topology *read_all(const char *sys, const char *status, const struct id_set *unbound)
{
    struct topology *t = mem_alloc(1, sizeof *t);
    struct id_set online, allowed, memory, nodes = {0};

    if (!t)
        return NULL;
    read_allowed(status, &allowed, &memory);
    if (!read_sys(sys, "cpu/online", &online))
        return t; /* nothing is known */
    t->cpus = both(&online, unbound ? unbound : &allowed);
    t->sys = x_strdup(sys);
    if (read_sys(sys, "node/has_memory", &t->memory))
        t->memory = both(&t->memory, &memory);
    read_sys(sys, "node/online", &nodes);
    for (uint32_t id = 0; id < end_of(&nodes); id++) {
        struct id_set cpus;
        char name[64];
        snprintf(name, sizeof name, "node/node%u/cpulist", id);
        if (!id_set_has(&nodes, id) || !read_sys(sys, name, &cpus))
            continue;
        cpus = both(&cpus, &t->cpus);
        add_node(t, id, &cpus);
    }
    if (!t->n_nodes) /* a kernel without nodes */
        add_node(t, 0, &t->cpus);
    return t;
}

struct topology *topology_read(const char *sys, const char *status)
{
    return read_all(sys, status, NULL);
}

struct topology *topology_host(void)
{
    struct id_set unbound;
    bool bound = cpus_unbound(&unbound);

    return read_all(SYS, STATUS, bound ? &unbound : NULL);
}

void topology_free(struct topology *topology)
{
    if (topology)
        free(topology->sys);
    free(topology);
}

const struct id_set *topology_cpus(const struct topology *topology)
{
    return &topology->cpus;
}

const struct id_set *topology_memory(const struct topology *topology)
{
    return &topology->memory;
}

/* ---- placing ---- */

/* Some nodes in a row, cyclically, and the threads on each. */
struct stretch {
    uint32_t first, n;
    uint32_t threads[ID_SET_MAX];
};

static const struct node *node_at(const struct topology *t, const struct stretch *s, uint32_t i)
{
    return &t->nodes[(s->first + i) % t->n_nodes];
}

/* The nodes from `first` on that have CPUs for all threads, or all nodes. */
static void stretch_from(const struct topology *t, uint32_t first, uint32_t threads,
                         struct stretch *ret)
{
    uint64_t cpus = 0, before = 0, given = 0;

    ret->first = first % t->n_nodes;
    for (ret->n = 0; ret->n < t->n_nodes && cpus < threads; ret->n++)
        cpus += node_at(t, ret, ret->n)->n_cpus;
    for (uint32_t i = 0; i < ret->n; i++) {
        before += node_at(t, ret, i)->n_cpus;
        ret->threads[i] = (uint32_t)(threads * before / cpus - given);
        given += ret->threads[i];
    }
}

/* Goes through the places up to this one. `used` is what those before have of each node. */
static void find_stretch(const struct topology *t, const struct placement_options *o,
                         uint32_t *used, struct stretch *ret)
{
    uint32_t first = 0;

    for (uint32_t place = 0;; place++) {
        stretch_from(t, first, o->threads, ret);
        if (place == o->place)
            return;
        for (uint32_t i = 0; i < ret->n; i++)
            used[(ret->first + i) % t->n_nodes] += ret->threads[i];
        first += ret->n;
    }
}

static bool fits(const struct topology *t, const struct stretch *s, const uint32_t *used)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (used[(s->first + i) % t->n_nodes] + s->threads[i] > node_at(t, s, i)->n_cpus)
            return false;
    return true;
}

/* A node's CPUs in the order in which threads get them: one of each core, then the second ones;
 * unless `some`, all are needed anyway. */
static void order_cpus(const struct topology *t, const struct node *node, bool some, uint16_t *ret)
{
    uint16_t rank[ID_SET_MAX] = {0}; /* 1 + how many of its core's CPUs come before it */
    uint32_t left = node->n_cpus, end = end_of(&node->cpus);
    /* Not read for nothing: it is a file for each core. */
    bool siblings = some && has_siblings(t->sys);

    for (uint32_t cpu = 0; cpu < end; cpu++) {
        struct id_set core = {0};
        char name[64];
        if (!id_set_has(&node->cpus, cpu) || rank[cpu])
            continue;
        snprintf(name, sizeof name, "cpu/cpu%u/topology/thread_siblings_list", cpu);
        if (siblings)
            read_sys(t->sys, name, &core);
        id_set_add(&core, cpu);
        uint16_t n = 0;
        for (uint32_t c = cpu; c < end; c++)
            if (id_set_has(&core, c) && id_set_has(&node->cpus, c) && !rank[c])
                rank[c] = ++n;
    }
    for (uint16_t r = 1; left; r++)
        for (uint32_t cpu = 0; cpu < end; cpu++)
            if (rank[cpu] == r) {
                *ret++ = (uint16_t)cpu;
                left--;
            }
}

/* One CPU each, or any of the node's. */
static void give(const struct topology *t, const struct stretch *s, const uint32_t *used, bool cpus,
                 struct id_set *threads)
{
    uint16_t order[ID_SET_MAX];

    for (uint32_t i = 0; i < s->n; i++) {
        const struct node *node = node_at(t, s, i);
        uint32_t from = used[(s->first + i) % t->n_nodes];
        if (cpus)
            order_cpus(t, node, s->threads[i] < node->n_cpus, order);
        for (uint32_t k = 0; k < s->threads[i]; k++, threads++) {
            if (cpus)
                id_set_add(threads, order[(from + k) % node->n_cpus]);
            else
                *threads = node->cpus;
        }
    }
}

void placement_choose(const struct topology *topology, const struct placement_options *options,
                      struct placement *ret)
{
    uint32_t used[ID_SET_MAX] = {0};
    struct stretch stretch;

    *ret = (struct placement){.n_threads = options->threads};
    if (options->pin == TOPOLOGY_PIN_NEVER || !topology->n_nodes || !options->threads ||
        (options->pin == TOPOLOGY_PIN_AUTO && options->shared))
        return;
    find_stretch(topology, options, used, &stretch);
    bool cpus = options->pin == TOPOLOGY_PIN_ALWAYS || fits(topology, &stretch, used);
    if (!cpus && topology->n_nodes == 1)
        return;
    ret->threads = mem_alloc(options->threads, sizeof *ret->threads);
    if (!ret->threads)
        return;
    give(topology, &stretch, used, cpus, ret->threads);
    for (uint32_t i = 0; id_set_count(&topology->memory) > 1 && i < stretch.n; i++) {
        uint32_t id = node_at(topology, &stretch, i)->id;
        if (id_set_has(&topology->memory, id))
            id_set_add(&ret->memory, id);
    }
}

void placement_clear(struct placement *placement)
{
    free(placement->threads);
    *placement = (struct placement){0};
}

/* ---- binding ---- */

static struct id_set unbound;
static _Atomic int unbound_state; /* 0: unknown, 1: being read, 2: known */

static bool set_affinity(const struct id_set *cpus)
{
    return !sched_setaffinity(0, sizeof cpus->bits, (const cpu_set_t *)cpus->bits);
}

bool cpus_bind(const struct id_set *cpus)
{
    int unknown = 0;

    if (atomic_compare_exchange_strong(&unbound_state, &unknown, 1))
        atomic_store(&unbound_state,
                     sched_getaffinity(0, sizeof unbound.bits, (cpu_set_t *)unbound.bits) ? 0 : 2);
    return atomic_load(&unbound_state) == 2 && set_affinity(cpus);
}

void cpus_unbind(void)
{
    if (atomic_load(&unbound_state) == 2)
        set_affinity(&unbound);
}

bool cpus_unbound(struct id_set *ret)
{
    bool known = atomic_load(&unbound_state) == 2;

    if (known)
        *ret = unbound;
    return known;
}

/* ---- memory ---- */

int memory_spread(void *at, uint64_t n, const struct id_set *nodes)
{
    uint32_t count = id_set_count(nodes);
    unsigned long mask[ID_SET_MAX / (CHAR_BIT * sizeof(unsigned long))];

    _Static_assert(sizeof mask == sizeof nodes->bits, "a word of the kernel's is one of ours");
    if (!count)
        return 0;
    memcpy(mask, nodes->bits, sizeof mask);
    /* The kernel takes one bit less than it is told of. */
    return syscall(SYS_mbind, at, n, count > 1 ? MPOL_INTERLEAVE : MPOL_PREFERRED, mask,
                   (unsigned long)ID_SET_MAX + 1, 0) < 0
               ? -errno
               : 0;
}

void memory_interleave(void *at, uint64_t n)
{
    struct id_set ignored, allowed, nodes;

    if (!read_sys(SYS, "node/has_memory", &nodes) || id_set_count(&nodes) < 2)
        return;
    read_allowed(STATUS, &ignored, &allowed);
    nodes = both(&nodes, &allowed);
    if (id_set_count(&nodes) > 1)
        memory_spread(at, n, &nodes);
}
