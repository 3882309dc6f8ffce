/* SPDX-License-Identifier: Apache-2.0 */
/* An engine whose weights are still arriving; see "Early" in engine.h. */
#include "engine/engine_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

static int break_for_good(struct engine *engine, const struct error *why, struct error *err)
{
    engine->broken = *why;
    error_prefix(&engine->broken, "weights");
    if (err)
        *err = engine->broken;
    return engine->broken.code;
}

/* All of it is there: the digest tells which weights they are. */
static int settle(struct engine *engine, struct error *err)
{
    int seals = fcntl(engine->options.weights, F_GET_SEALS);

    if (seals < 0 || !(seals & F_SEAL_WRITE) || !(seals & F_SEAL_SHRINK))
        return error_set(err, EPERM, "whole, but not sealed (seals %#x)", (unsigned)seals);
    engine->layout->digest = filling_digest(engine->filling);
    return 0;
}

int preload_attach(struct engine *engine, struct error *err)
{
    if (!engine->options.early)
        return 0;
    int r = filling_attach(engine->options.filling, &engine->filling, err);
    if (r < 0)
        return r;
    switch (filling_state(engine->filling)) {
    case FILLING_DONE:
        return settle(engine, err);
    case FILLING_FAILED:
        return error_set(err, EPIPE, "the load of the weights has failed");
    default:
        engine->early = true;
        return 0;
    }
}

/* How far the arena has to be there for layer `layer`: up to where the next one begins. */
static uint64_t layer_end(const struct weights_layout *layout, uint32_t layer)
{
    char prefix[32];
    bool inside = false;

    snprintf(prefix, sizeof prefix, "layers.%u.", layer);
    for (uint32_t i = 0; i < layout->n_weights; i++) {
        bool match = !strncmp(layout->weights[i].name, prefix, strlen(prefix));
        if (inside && !match)
            return layout->weights[i].offset;
        inside |= match;
    }
    return layout->bytes;
}

static uint64_t embedding_end(const struct weights_layout *layout)
{
    for (uint32_t i = 0; i < layout->n_weights; i++)
        if (!strncmp(layout->weights[i].name, "layers.", 7))
            return layout->weights[i].offset;
    return layout->bytes;
}

int preload_run(struct engine *engine, struct bucket *bucket, struct error *err)
{
    uint32_t n = graph_segment_count(bucket->graph), layer = 0;
    struct ember_backend_error e = {0};
    struct error why = {0};
    int r = 0;

    for (uint32_t i = 0; i < n && r == 0; i++) {
        uint64_t need = UINT64_MAX; /* of the head: all, sealed */
        switch (graph_segment_at(bucket->graph, i)->kind) {
        case SEGMENT_EMBED:
            need = embedding_end(engine->layout);
            break;
        case SEGMENT_LAYER:
            need = layer_end(engine->layout, layer++);
            break;
        }
        r = filling_wait(engine->filling, need, NULL, NULL, &why);
        if (r < 0) {
            engine->backend->queue_sync(engine->queue, &e);
            return break_for_good(engine, &why, err);
        }
        r = graph_exec_run_segment(bucket->exec, engine->queue, i, err);
    }
    return r;
}

int preload_finish(struct engine *engine, struct error *err)
{
    bool (*waiting)(void *ctx) = engine->waiting;
    struct error why = {0};

    engine->waiting = NULL; /* nobody is served before this is over */
    int r = filling_wait(engine->filling, UINT64_MAX, NULL, NULL, &why);
    if (r == 0)
        r = settle(engine, &why);
    if (r == 0)
        r = canary_prove(engine, &engine->buckets[BUCKET_T64], &why);
    engine->waiting = waiting;
    if (r < 0)
        return break_for_good(engine, &why, err);
    engine->early = false;
    return 0;
}
