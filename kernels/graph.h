/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Captured graphs: a plan lowered for one backend, relocatable, storable.
 *
 * A captured graph is a list of launches (kernel name, specialisation, grid, arguments) in which
 * every argument is a constant or (arena, offset), cut into the plan's segments. It holds no
 * address and no pointer. Instantiating it relocates the arguments against the arenas of one
 * process and resolves the kernels.
 *
 * Stored form (little-endian, all offsets from its start, 8-byte aligned):
 *   header    magic "EMBG", version, total bytes, counts and offsets of the sections below
 *   arenas    bytes needed of each arena            segments  kind, variant, first launch, count
 *   kernels   name[32], spec[96]                    launches  kernel, grid[3], first arg, arg count
 *   args      value u64                             relocs    arena i8 for each arg (-1: constant)
 * The cache adds the checksum. graph_parse trusts nothing: every count, index and (arena, offset)
 * is checked.
 */
#ifndef EMBER_KERNELS_GRAPH_H
#define EMBER_KERNELS_GRAPH_H

#include <ember/backend.h>

#include "base/error.h"
#include "base/mem.h"
#include "kernels/plan.h"

#define GRAPH_FORMAT_VERSION 1 /* of the stored form; part of every graph's cache key */

struct graph;      /* captured, relocatable */
struct graph_exec; /* instantiated in this process */

/* Lowers a checked plan. */
int graph_capture(const struct ember_backend *backend, struct ember_device *device,
                  const struct plan *plan, struct graph **ret, struct error *err);
/* Appends the stored form to `out`. */
int graph_store(const struct graph *graph, struct buffer *out, struct error *err);
/* From the stored form, copied; -EBADMSG says what is wrong with it. */
int graph_parse(const void *data, size_t len, struct graph **ret, struct error *err);
void graph_free(struct graph *graph);
DEFINE_CLEANUP(struct graph *, graph_free)

/* The kernels that it launches: index 0..graph_kernel_count-1. */
struct graph_kernel {
    char name[32], spec[96];
};
uint32_t graph_kernel_count(const struct graph *graph);
const struct graph_kernel *graph_kernel_at(const struct graph *graph, uint32_t index);
uint32_t graph_launch_count(const struct graph *graph);
const struct graph_kernel *graph_launch_kernel(const struct graph *graph, uint32_t launch);
uint32_t graph_segment_count(const struct graph *graph);
const struct plan_segment *graph_segment_at(const struct graph *graph,
                                            uint32_t index); /* launches */
uint64_t graph_arena_bytes(const struct graph *graph, enum ember_arena arena);

/*
 * Relocates: base[a] is the device address of arena a and size[a] its bytes (each at least what the
 * graph needs; -ERANGE otherwise), kernels[i] what kernel i resolved to. Uses a native graph where
 * the backend has one.
 */
int graph_instantiate(const struct graph *graph, const struct ember_backend *backend,
                      struct ember_device *device, const uint64_t base[EMBER_ARENA_COUNT],
                      const uint64_t size[EMBER_ARENA_COUNT], struct ember_kernel *const *kernels,
                      struct graph_exec **ret, struct error *err);
void graph_exec_free(struct graph_exec *exec);
DEFINE_CLEANUP(struct graph_exec *, graph_exec_free)

/* Enqueues all launches, or those of segment `segment` alone. */
int graph_exec_run(struct graph_exec *exec, struct ember_queue *queue, struct error *err);
int graph_exec_run_segment(struct graph_exec *exec, struct ember_queue *queue, uint32_t segment,
                           struct error *err);

/* From now on runs add each launch's nanoseconds to ns[0..graph_launch_count-1], until NULL is
 * given. -ENOTSUP: the backend keeps no times. */
int graph_exec_profile(struct graph_exec *exec, uint64_t *ns, struct error *err);

#endif
