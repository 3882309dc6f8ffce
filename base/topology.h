/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where this machine's CPUs and memory are (NUMA nodes, cores), what of them this process may use,
 * and what follows from it for threads and memory.
 *
 * Weights are one memory that all instances read: its pages are interleaved over the nodes, so that
 * no node's memory is the limit of all. An instance runs on as few nodes as have CPUs for its
 * threads, and keeps there what is its own. Instances count themselves ("place" 0, 1, ...), so that
 * each knows which CPUs the others have taken, without asking.
 *
 * Nothing here can fail a program: what cannot be read, or what the kernel refuses (containers
 * often forbid mbind(2)), is left as the kernel does it.
 */
#ifndef EMBER_BASE_TOPOLOGY_H
#define EMBER_BASE_TOPOLOGY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"

/* Numbers of CPUs or nodes. Greater ones are none of ours. */
#define ID_SET_MAX 1024u
struct id_set {
    uint64_t bits[ID_SET_MAX / 64];
};
static inline bool id_set_has(const struct id_set *set, uint32_t id)
{
    return id < ID_SET_MAX && (set->bits[id / 64] >> id % 64 & 1);
}
static inline void id_set_add(struct id_set *set, uint32_t id)
{
    if (id < ID_SET_MAX)
        set->bits[id / 64] |= UINT64_C(1) << id % 64;
}
uint32_t id_set_count(const struct id_set *set);
/* The kernel's form, "0-3,8,10-11"; false and *ret untouched when it is not of that form. */
bool id_set_parse(const char *text, struct id_set *ret);

struct topology;

/* Of this machine; NULL when memory is short. */
struct topology *topology_host(void);
/* From other files than /sys/devices/system and /proc/self/status, for tests. */
struct topology *topology_read(const char *sys, const char *status);
void topology_free(struct topology *topology);
DEFINE_CLEANUP(struct topology *, topology_free)

/* CPUs that are online and that this process may use; and nodes with memory that it may use. */
const struct id_set *topology_cpus(const struct topology *topology);
const struct id_set *topology_memory(const struct topology *topology);

/* ---- threads ---- */

enum topology_pin {
    TOPOLOGY_PIN_NEVER,  /* the kernel moves threads as it likes */
    TOPOLOGY_PIN_AUTO,   /* to nodes; to CPUs while there are enough for all instances so far */
    TOPOLOGY_PIN_ALWAYS, /* to CPUs, which instances share when there are more of them */
};

struct placement_options {
    uint32_t threads; /* > 0 */
    uint32_t place;   /* instances of this process's parent with a lower number may be running */
    enum topology_pin pin;
    bool shared; /* others use these CPUs, too (there is a quota): auto leaves all to the kernel */
};

struct placement {
    uint32_t n_threads;
    struct id_set *threads; /* the CPUs of each thread; NULL: all of them */
    struct id_set memory;   /* nodes for what is the instance's own; empty: as the kernel likes */
};

/*
 * The instance's nodes are the next ones in turn that have as many CPUs as it has threads; threads
 * are spread over them as CPUs are, a core's second CPU coming after all first ones. With one node,
 * nothing remains of a policy but the CPUs.
 */
void placement_choose(const struct topology *topology, const struct placement_options *options,
                      struct placement *ret);
void placement_clear(struct placement *placement);

/* Binds the calling thread to `cpus`. What it starts from now on begins there, too, and may say
 * cpus_unbind(). False when the kernel refuses. */
bool cpus_bind(const struct id_set *cpus);
/* The calling thread may use again what this process could when it bound one for the first time.
 * May be called between fork and exec. */
void cpus_unbind(void);

/* What this process could use before it bound a thread; false when it never has. */
bool cpus_unbound(struct id_set *ret);

/* ---- memory ---- */

/*
 * Pages of [at, at + n) that do not exist yet will be on these nodes: in turn over several,
 * preferably on one, wherever the kernel likes with none. Of a mapped memfd: for all who use it.
 * `at` is a page's boundary. Returns 0 or a negative errno, which needs no attention.
 */
int memory_spread(void *at, uint64_t n, const struct id_set *nodes);
/* Interleaves over all nodes of this machine that have memory for us, if there are several. */
void memory_interleave(void *at, uint64_t n);

#endif
