/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that run CPU kernels.
 *
 * A launch is a kernel body called once for each of its blocks; a run is a list of launches, each
 * of which sees the stores of those before it. The calling thread works too, so a pool of n has n -
 * 1 threads of its own. They start with the first launch that has more than one block: a pool that
 * is only ever idle costs neither threads nor processor time, and one that has become idle has them
 * parked.
 *
 * How a run goes on: the current launch's blocks are claimed from one atomic word; whoever finishes
 * the last block puts up the next launch (running launches of a single block itself, on the way).
 * A thread that the kernel has descheduled holds up only the blocks it has claimed, never the rest.
 *
 * A run whose launches have few blocks is for few threads, and the others sleep through it: all
 * that look for blocks make each claim slower. Those that wait for the next launch spin, giving
 * their processor away after the first part of that, and then sleep on a futex. They spin as long
 * as it has lately taken to wake a sleeper (which costs at most twice what knowing the future
 * would), within bounds: where processors are short, waking takes long for want of one, and
 * spinning would make that worse.
 *
 * One run at a time: a pool is used by one thread (its device's).
 */
#ifndef EMBER_KERNELS_CPU_POOL_H
#define EMBER_KERNELS_CPU_POOL_H

#include <stdint.h>

#include "base/mem.h"
#include "base/topology.h"

/* Between these a thread spins before it sleeps: as long as waking it takes, as measured. */
#define POOL_SPIN_LEAST_NS 10000u
#define POOL_SPIN_MOST_NS 100000u
#define POOL_BLOCKS_MAX 0xffffffu /* blocks of one launch */
#define POOL_THREADS_MAX 1024u

/* The body of a kernel: does block `block` of `n_blocks`; blocks touch disjoint outputs. */
typedef void (*pool_body_fn)(const uint64_t *args, uint32_t block, uint32_t n_blocks);

struct pool_launch {
    pool_body_fn body;
    const uint64_t *args;
    uint32_t n_blocks; /* <= POOL_BLOCKS_MAX; 0: nothing to do */
};

struct pool;

/* threads: with the caller; 0 means cpu_limit(). NULL when memory is short. Starts nothing yet. */
struct pool *pool_new(uint32_t threads);
/*
 * Where the threads run; thread 0 is the caller. They are bound after POOL_UNBOUND_RUNS runs: an
 * instance that starts has its first ones quicker on whichever processor is free. The caller is let
 * go by pool_free, which is then for the same thread to call. The pool takes where->threads, which
 * are as many as it has. Before the first run.
 */
#define POOL_UNBOUND_RUNS 16
void pool_place(struct pool *pool, struct placement *where);
void pool_free(struct pool *pool);
DEFINE_CLEANUP(struct pool *, pool_free)

/* Runs the launches in order and returns when all are done. `list` and its args must live that
 * long. */
void pool_run(struct pool *pool, const struct pool_launch *list, uint32_t count);

/* The same, and adds to ns[i] the nanoseconds that launch i took, from the start of its first block
 * to the end of its last. */
void pool_run_timed(struct pool *pool, const struct pool_launch *list, uint32_t count,
                    uint64_t *ns);

/*
 * Into how many blocks to cut work that has so many grains, the smallest pieces worth a claim. Up
 * to 16 blocks are one grain each; beyond, they grow fourfold before there are more; and there are
 * some for each thread before any is more than a grain.
 */
uint32_t pool_blocks(const struct pool *pool, uint32_t grains);

/* Threads that take part, the caller included. */
uint32_t pool_threads(const struct pool *pool);

/* For tests and metrics: threads started so far, and how many of them sleep now. */
uint32_t pool_started(const struct pool *pool);
uint32_t pool_asleep(const struct pool *pool);
/* How many the last run was for. */
uint32_t pool_active(const struct pool *pool);
/* How long a waiting thread would spin now, in nanoseconds. */
uint32_t pool_spin_ns(const struct pool *pool);

#endif
