/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One bucket's graph. The key of a captured graph is what it depends on: the plan (by digest), the
 * backend and the device's fingerprint. A graph that comes from the cache but does not fit the
 * plan's arenas is captured anew.
 */
#include "engine/engine_private.h"

#include <errno.h>
#include <stdio.h>

#include "base/clock.h"
#include "kernels/backend.h"

int bucket_plan(const struct engine *engine, struct bucket *bucket, struct error *err)
{
    if (bucket->plan)
        return 0;
    return model_plan(engine->model, engine->layout, &bucket->request, &bucket->plan, err);
}

struct capture {
    const struct engine *engine;
    struct ember_device *device;
    const struct plan *plan;
    struct cache *cache; /* NULL: none is asked */
    const struct cache_key *key;
    struct cache_miss miss;
};

static int capture(void *ctx, struct buffer *out, struct error *err)
{
    struct capture *c = ctx;
    _cleanup_(graph_freep) struct graph *graph = NULL;

    if (c->cache) /* now, before the capture is stored */
        cache_explain_miss(c->cache, c->key, &c->miss);
    int r = plan_check(c->plan, err);
    if (r < 0)
        return r;
    r = graph_capture(c->engine->backend, c->device, c->plan, &graph, err);
    if (r < 0)
        return r;
    return graph_store(graph, out, err);
}

static struct cache_key *graph_key(const struct engine *engine, const struct bucket *bucket)
{
    const struct model_info *info = model_info(engine->model);
    struct digest plan = plan_digest(bucket->plan);
    char subject[CACHE_SUBJECT_MAX];

    snprintf(subject, sizeof subject, "%s %u layers, %u tokens%s", info->architecture,
             info->n_layers, bucket->request.tokens, bucket->request.taps ? ", taps" : "");
    struct cache_key *key = cache_key_begin(CACHE_GRAPH, subject);
    cache_key_add(key, "plan", plan.bytes, sizeof plan.bytes);
    cache_key_add_string(key, "backend", engine->backend->name);
    cache_key_add_string(key, "device", engine->device_info.fingerprint);
    cache_key_add_u64(key, "graph format", GRAPH_FORMAT_VERSION);
    return key;
}

/* A stored graph must want exactly the arenas and segments of the plan that it was keyed by. */
static int fits(const struct graph *graph, const struct plan *plan, struct error *err)
{
    if (graph_segment_count(graph) != plan->n_segments)
        return error_set(err, EBADMSG, "stored graph has %u segments, its plan %u",
                         graph_segment_count(graph), plan->n_segments);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        if (graph_arena_bytes(graph, a) != plan->arena_bytes[a])
            return error_set(err, EBADMSG,
                             "stored graph wants %llu bytes of arena %d, its plan %llu",
                             (unsigned long long)graph_arena_bytes(graph, a), a,
                             (unsigned long long)plan->arena_bytes[a]);
    return 0;
}

int bucket_graph(const struct engine *engine, struct ember_device *device, struct bucket *bucket,
                 struct error *err)
{
    uint64_t start = clock_ns();
    int r = bucket_plan(engine, bucket, err);
    if (r < 0)
        return r;
    struct cache *cache = bucket->request.taps ? NULL : engine->options.cache;
    _cleanup_(cache_key_freep) struct cache_key *key = graph_key(engine, bucket);
    struct capture ctx = {engine, device, bucket->plan, cache, key, {""}};
    struct cache_build build = {.build = capture, .ctx = &ctx, .timeout_ms = 10000};

    for (int attempt = 0;; attempt++) {
        _cleanup_cache_value_ struct cache_value value = {0};
        r = cache_get_or_build(cache, key, &build, &value, err);
        if (r < 0)
            return r;
        bucket->restored = r == 0;
        bucket->miss = ctx.miss;
        r = graph_parse(value.data, value.len, &bucket->graph, err);
        if (r == 0)
            r = fits(bucket->graph, bucket->plan, err);
        if (r == 0)
            break;
        graph_free(TAKE(bucket->graph));
        if (!bucket->restored || attempt)
            return r;
        /* The checksum held and the content does not: written by other code. Once more, anew. */
        struct digest digest = cache_key_digest(key);
        cache_remove(engine->options.cache, &digest, NULL);
    }
    *(bucket->restored ? &bucket->restore_ms : &bucket->capture_ms) = clock_ms_since(start);
    return 0;
}

int bucket_instantiate(struct engine *engine, struct bucket *bucket, struct error *err)
{
    uint32_t n = graph_kernel_count(bucket->graph);
    _cleanup_free_ struct ember_kernel **kernels = mem_alloc(n, sizeof *kernels);
    uint64_t base[EMBER_ARENA_COUNT] = {0};

    if (!kernels)
        return error_set(err, ENOMEM, "no memory for %u kernels", n);
    uint64_t start = clock_ns();
    int r = kernels_resolve(engine, bucket->graph, kernels, err);
    if (r < 0)
        return r;
    engine->start.kernels_ms += clock_ms_since(start);
    for (int a = 0; a < EMBER_ARENA_COUNT; a++)
        if (engine->memory[a])
            base[a] = engine->backend->memory_address(engine->memory[a]);
    start = clock_ns();
    r = graph_instantiate(bucket->graph, engine->backend, engine->device, base,
                          engine->memory_bytes, kernels, &bucket->exec, err);
    *(bucket->restored ? &bucket->restore_ms : &bucket->capture_ms) += clock_ms_since(start);
    return r;
}

void bucket_free(struct bucket *bucket)
{
    graph_exec_free(bucket->exec);
    free(bucket->profile);
    bucket->profile = NULL;
    graph_free(bucket->graph);
    plan_free(bucket->plan);
    bucket->exec = NULL;
    bucket->graph = NULL;
    bucket->plan = NULL;
}
