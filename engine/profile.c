/* SPDX-License-Identifier: Apache-2.0 */
/* Measuring: times of kernels, and KV pages that have been written. */
#include "engine/engine_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"

static void stop(struct bucket *bucket)
{
    if (bucket->profile)
        graph_exec_profile(bucket->exec, NULL, NULL);
    free(bucket->profile);
    bucket->profile = NULL;
}

int engine_profile(struct engine *engine, struct error *err)
{
    int r = 0;

    for (int i = 0; i < BUCKET_COUNT && r == 0; i++) {
        struct bucket *bucket = &engine->buckets[i];
        stop(bucket);
        bucket->profile_runs = 0;
        if (atomic_load(&bucket->state) != BUCKET_READY)
            continue;
        bucket->profile = mem_alloc(graph_launch_count(bucket->graph), sizeof *bucket->profile);
        r = bucket->profile ? graph_exec_profile(bucket->exec, bucket->profile, err)
                            : error_set(err, ENOMEM, "no memory for the times of %u launches",
                                        graph_launch_count(bucket->graph));
    }
    for (int i = 0; i < BUCKET_COUNT && r < 0; i++)
        stop(&engine->buckets[i]);
    return r;
}

static struct engine_profile_row *row_of(struct engine_profile_row *rows, uint32_t *n,
                                         const char *kernel)
{
    for (uint32_t i = 0; i < *n; i++)
        if (!strcmp(rows[i].kernel, kernel))
            return &rows[i];
    if (*n == ENGINE_PROFILE_MAX)
        return &rows[*n - 1];
    memset(&rows[*n], 0, sizeof *rows);
    memcpy(rows[*n].kernel, kernel, sizeof rows->kernel);
    return &rows[(*n)++];
}

static int by_time(const void *a, const void *b)
{
    const struct engine_profile_row *x = a, *y = b;

    return (x->ns < y->ns) - (x->ns > y->ns);
}

uint32_t engine_profile_end(struct engine *engine, struct engine_profile_row *rows)
{
    uint32_t n = 0;

    for (int i = 0; i < BUCKET_COUNT; i++) {
        struct bucket *bucket = &engine->buckets[i];
        for (uint32_t l = 0; bucket->profile && l < graph_launch_count(bucket->graph); l++) {
            struct engine_profile_row *row =
                row_of(rows, &n, graph_launch_kernel(bucket->graph, l)->name);
            row->launches += bucket->profile_runs;
            row->ns += bucket->profile[l];
        }
        stop(bucket);
    }
    qsort(rows, n, sizeof *rows, by_time);
    return n;
}

int engine_fill_kv(struct engine *engine, struct error *err)
{
    uint64_t bytes = engine->memory_bytes[EMBER_ARENA_KV];
    _cleanup_free_ uint32_t *noise = mem_alloc(MIB, 1);
    struct ember_backend_error e = {0};
    int r = 0;

    if (!noise)
        return error_set(err, ENOMEM, "no memory for a MiB of noise");
    /* As float32 or bfloat16 of magnitude about 1/32, as float16 about 1. */
    for (uint32_t i = 0, x = 1; i < MIB / sizeof *noise; i++, x = x * 1664525 + 1013904223)
        noise[i] = 0x3d003d00 | (x >> 8 & 0x807f807f);
    for (uint64_t at = 0; r == 0 && at < bytes; at += MIB)
        r = engine->backend->copy_in(engine->queue, engine->memory[EMBER_ARENA_KV], at, noise,
                                     MIN(bytes - at, MIB), &e);
    if (r == 0)
        r = engine->backend->queue_sync(engine->queue, &e);
    return r < 0 ? backend_fail(engine->backend, r, &e, err) : 0;
}
