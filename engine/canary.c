/* SPDX-License-Identifier: Apache-2.0 */
/* The canary: see engine.h. What it proves: kernels, relocation and weights are those of the
 * recorded run. */
#include "engine/engine_private.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fault.h"
#include "kernels/backend.h"

#define CANARY_VERSION 1 /* of the input and of what is digested */

static struct cache_key *canary_key(const struct engine *engine)
{
    const struct model_info *info = model_info(engine->model);
    struct digest config = plan_digest(engine->buckets[BUCKET_T64].plan);
    char subject[CACHE_SUBJECT_MAX];

    snprintf(subject, sizeof subject, "%s %u layers", info->architecture, info->n_layers);
    struct cache_key *key = cache_key_begin(CACHE_CANARY, subject);
    cache_key_add_u64(key, "canary version", CANARY_VERSION);
    cache_key_add(key, "weights", engine->layout->digest.bytes,
                  sizeof engine->layout->digest.bytes);
    cache_key_add(key, "plan", config.bytes, sizeof config.bytes);
    cache_key_add_string(key, "backend", engine->backend->name);
    cache_key_add_string(key, "device", engine->device_info.fingerprint);
    return key;
}

/* Embed, the first layer of each variant, the head's probe. */
static int run_segments(struct engine *engine, struct bucket *bucket, struct error *err)
{
    uint32_t n = graph_segment_count(bucket->graph);
    uint64_t seen = 0;
    int r = 0;

    for (uint32_t i = 0; i < n && r == 0; i++) {
        const struct plan_segment *segment = graph_segment_at(bucket->graph, i);
        if (segment->kind == SEGMENT_HEAD)
            continue;
        if (segment->kind == SEGMENT_LAYER) {
            uint64_t bit = UINT64_C(1) << (segment->variant & 63);
            if (seen & bit)
                continue;
            seen |= bit;
        }
        if (engine->waiting && engine->waiting(engine->waiting_ctx))
            return CANARY_LATER;
        r = graph_exec_run_segment(bucket->exec, engine->queue, i, err);
    }
    return r;
}

static int read_output(struct engine *engine, struct bucket *bucket, struct digest *ret,
                       struct error *err)
{
    const struct plan *plan = bucket->plan;
    const struct ember_backend *backend = engine->backend;
    size_t hidden = plan->final_hidden.dim[1] * sizeof(float),
           probe = plan->probe_rows * sizeof(float);
    _cleanup_free_ char *output = mem_alloc(hidden + probe, 1);
    struct ember_backend_error e = {0};

    if (!output)
        return error_set(err, ENOMEM, "no memory for the canary's output");
    int r = backend->copy_out(engine->queue, output, engine->memory[plan->final_hidden.arena],
                              plan->final_hidden.offset, hidden, &e);
    if (r == 0)
        r = backend->copy_out(engine->queue, output + hidden, engine->memory[EMBER_ARENA_IO],
                              plan->io.logits, probe, &e);
    int synced = backend->queue_sync(engine->queue, &e);
    if (r < 0 || synced < 0)
        return backend_fail(backend, r < 0 ? r : synced, &e, err);
    if (fault_hit(FAULT_CANARY))
        output[0] ^= 1;
    *ret = digest_of(output, hidden + probe);
    return 0;
}

static int run_canary(struct engine *engine, struct bucket *bucket, struct digest *ret,
                      struct error *err)
{
    uint32_t vocab = model_info(engine->model)->vocab_size;
    uint32_t n = MIN(CANARY_TOKENS, bucket->request.tokens);
    uint32_t tokens[CANARY_TOKENS], page = engine->pages; /* the one behind the caller's */
    struct engine_seq seq = {.tokens = tokens,
                             .n_tokens = n,
                             .prompt_len = n,
                             .pages = &page,
                             .n_pages = 1,
                             .sample = true};
    struct engine_step step = {.seqs = &seq, .n_seqs = 1};
    uint32_t rows;

    for (uint32_t i = 0; i < CANARY_TOKENS; i++)
        tokens[i] = (i * 7919 + 1) % vocab;
    /* A bucket that is too small for the whole input takes it token by token. */
    for (uint32_t done = 0; done < CANARY_TOKENS; done += n) {
        seq.tokens = tokens + done;
        seq.position = done;
        seq.prompt_len = CANARY_TOKENS;
        int r = step_run_inputs(engine, bucket, &step, &rows, err);
        if (r == 0)
            r = run_segments(engine, bucket, err);
        if (r == 0)
            r = read_output(engine, bucket, ret, err);
        if (r == CANARY_LATER)
            engine->backend->queue_sync(engine->queue, &(struct ember_backend_error){0});
        if (r != 0)
            return r;
    }
    return 0;
}

static int record(void *ctx, struct buffer *out, struct error *err)
{
    const struct digest *now = ctx;

    if (buffer_append(out, now->bytes, sizeof now->bytes) < 0)
        return error_set(err, ENOMEM, "no memory for its record");
    return 0;
}

/* The recorded digest; this run's becomes the record when there is none. */
static int recall(struct engine *engine, const struct digest *now, struct error *err)
{
    _cleanup_(cache_key_freep) struct cache_key *key = canary_key(engine);
    _cleanup_cache_value_ struct cache_value value = {0};
    struct cache_build build = {.build = record, .ctx = (void *)now, .timeout_ms = 1000};

    int r = cache_get_or_build(engine->options.cache, key, &build, &value, err);
    if (r < 0)
        return r;
    if (value.len != sizeof engine->canary.bytes)
        return error_set(err, EBADMSG, "the canary's record has %zu bytes instead of %zu",
                         value.len, sizeof engine->canary.bytes);
    memcpy(engine->canary.bytes, value.data, sizeof engine->canary.bytes);
    engine->canary_known = true;
    return 0;
}

int canary_prove(struct engine *engine, struct bucket *bucket, struct error *err)
{
    char was[DIGEST_HEX_SIZE], is[DIGEST_HEX_SIZE];
    uint64_t start = clock_ns();
    struct digest now;

    int r = run_canary(engine, bucket, &now, err);
    if (r == 0 && !engine->canary_known)
        r = recall(engine, &now, err);
    engine->start.canary_ms += clock_ms_since(start);
    if (r == CANARY_LATER)
        return r;
    if (r < 0) {
        error_prefix(err, "canary"); /* whose own return stands for *err, which may be NULL */
        return r;
    }
    if (digest_equal(&now, &engine->canary))
        return 0;
    return error_set(
        err, EBADMSG,
        "canary: the graph for %u tokens gives %s, recorded is %s: the weights, a cached "
        "kernel or graph, or the processor differ from the recorded run",
        bucket->request.tokens, digest_hex(&now, is), digest_hex(&engine->canary, was));
}
