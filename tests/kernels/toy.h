/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A small plan with random weights, and running it: through any backend, as a captured graph or
 * launch by launch, or through the reference ops.
 */
#ifndef EMBER_TESTS_KERNELS_TOY_H
#define EMBER_TESTS_KERNELS_TOY_H

#include "kernels/graph.h"

#define TOY_TOKENS 6
#define TOY_HIDDEN 96
#define TOY_VOCAB 300
#define TOY_LAYERS 3

struct toy {
    struct plan *plan;
    char *weights, *io; /* arenas as they are before a step */
    uint64_t weights_bytes;
};

void toy_make(struct toy *toy, uint32_t seed);
void toy_free(struct toy *toy);

/* The same through kernels/ref; the caller frees the IO arena that is returned. */
char *toy_reference(const struct toy *toy);

/* A device with the toy's arenas on it. */
struct rig {
    const struct ember_backend *backend;
    struct ember_device *device;
    struct ember_queue *queue;
    struct ember_memory *memory[EMBER_ARENA_COUNT];
    uint64_t base[EMBER_ARENA_COUNT], size[EMBER_ARENA_COUNT];
};

/* Fails the running test when anything goes wrong. Weights are imported from a sealed memfd. */
void rig_open(struct rig *rig, const struct toy *toy, const char *backend, uint32_t threads);
void rig_close(struct rig *rig);
/* Captures, instantiates and runs; returns the IO arena. Segment by segment when `by_segment`. */
char *rig_run(struct rig *rig, const struct toy *toy, const struct graph *graph, bool by_segment);
/* The ahead-of-time kernels of a graph, for graph_instantiate. */
void rig_kernels(struct rig *rig, const struct graph *graph, struct ember_kernel **ret);
/* A sealed memfd with these bytes. */
int sealed_memfd(const void *data, size_t len, unsigned seals);

#endif
