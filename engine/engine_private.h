/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's insides, shared by its files: memory, kernels, buckets, canary. */
#ifndef EMBER_ENGINE_PRIVATE_H
#define EMBER_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include <ember/backend.h>

#include "cache/filling.h"
#include "engine/engine.h"
#include "kernels/graph.h"

#define CANARY_TOKENS 4
#define ENGINE_KERNELS_MAX 256

/* X(tokens, seqs, rows): the first is the one a start waits for; the others come largest first. */
#define ENGINE_BUCKETS(X)                                                                          \
    X(64, 64, 64)                                                                                  \
    X(512, 64, 64)                                                                                 \
    X(16, 16, 16)                                                                                  \
    X(1, 1, 1)

enum {
#define X(t, s, r) BUCKET_T##t,
    ENGINE_BUCKETS(X)
#undef X
        BUCKET_TAPS, /* only with tap_tokens */
    BUCKET_COUNT
};

enum bucket_state {
    BUCKET_ABSENT,   /* not asked for yet */
    BUCKET_PREPARED, /* graph there, by the background thread */
    BUCKET_READY,    /* instantiated and proved */
    BUCKET_DROPPED   /* could not be made; error.code is set until that has been told */
};

struct bucket {
    struct plan_request request;
    _Atomic int state;      /* enum bucket_state; the thread that moves it on owns the rest */
    bool restored;          /* from the cache */
    struct cache_miss miss; /* why not; without a cause: no cache was asked */
    double capture_ms, restore_ms;
    uint64_t *profile; /* nanoseconds of each launch while there is a profile */
    uint64_t profile_runs;
    struct plan *plan;
    struct graph *graph;
    struct graph_exec *exec;
    struct error error;
};

/* A kernel that some graph launches, resolved once for all graphs. */
struct resolved {
    struct graph_kernel kernel;
    struct ember_kernel *entry;
    struct ember_module *module; /* NULL: ahead-of-time */
};

struct engine {
    struct engine_options options;
    const struct ember_backend *backend;
    struct ember_device *device;
    struct ember_device_info device_info;
    struct ember_queue *queue;
    struct model *model;
    struct weights_layout *layout;
    char *source_dir;
    struct ember_memory *memory[EMBER_ARENA_COUNT];
    uint64_t memory_bytes[EMBER_ARENA_COUNT];
    uint32_t pages;
    struct bucket buckets[BUCKET_COUNT];
    struct resolved kernels[ENGINE_KERNELS_MAX];
    uint32_t n_kernels;
    struct engine_start start;
    bool (*waiting)(void *ctx); /* asked by the canary between segments; NULL: nobody waits */
    void *waiting_ctx;
    struct digest canary;
    bool canary_known;
    struct filling *filling; /* of an early engine; until the end */
    atomic_bool early;       /* the weights are not all there, or not proved */
    struct error broken;     /* code 0: it is not */
    uint8_t *staging;        /* host side of a step's inputs */
    uint64_t staging_bytes;
    int32_t *sampled;
    float *logits, *hidden; /* grown when asked for */
    uint64_t logits_bytes, hidden_bytes;
    pthread_t thread;
    bool thread_running;
    atomic_bool stop;
    int wake; /* eventfd */
};

/* bucket.c: plan and graph, from the cache or captured; `device` is the calling thread's own. */
int bucket_plan(const struct engine *engine, struct bucket *bucket, struct error *err);
int bucket_graph(const struct engine *engine, struct ember_device *device, struct bucket *bucket,
                 struct error *err);
int bucket_instantiate(struct engine *engine, struct bucket *bucket, struct error *err);
void bucket_free(struct bucket *bucket);

/* kernels.c: fills `ret` (one entry a kernel of the graph). */
int kernels_resolve(struct engine *engine, const struct graph *graph, struct ember_kernel **ret,
                    struct error *err);
void kernels_free(struct engine *engine);

/* canary.c: runs it on a bucket; records the digest when none is known, else compares. */
int canary_prove(struct engine *engine, struct bucket *bucket, struct error *err);
#define CANARY_LATER 1 /* somebody waits (engine->waiting); nothing has been decided */

/* preload.c: an early engine */
int preload_attach(struct engine *engine, struct error *err);
/* Runs a bucket's segments as their weights arrive. */
int preload_run(struct engine *engine, struct bucket *bucket, struct error *err);
/* Waits until all weights are there, and proves them: `early` no more, or broken. */
int preload_finish(struct engine *engine, struct error *err);

/* step.c */
int step_run_inputs(struct engine *engine, struct bucket *bucket, const struct engine_step *step,
                    uint32_t *ret_rows, struct error *err);

/* Counts a miss in engine->start; an empty cause is none. */
void engine_note_miss(struct engine *engine, enum cache_kind kind, const struct cache_miss *why);

#endif
