/* SPDX-License-Identifier: Apache-2.0 */
/* Steps: checking what the caller asks, laying the inputs out, running a bucket, reading back. */
#include "engine/engine_private.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "kernels/backend.h"

static int check_seq(const struct engine *engine, const struct engine_seq *seq, uint32_t index,
                     struct error *err)
{
    const struct model_info *info = model_info(engine->model);
    uint64_t end = (uint64_t)seq->position + seq->n_tokens;

    if (!seq->n_tokens)
        return error_set(err, EINVAL, "sequence %u of the step has no tokens", index);
    if (end > info->max_positions)
        return error_set(err, EINVAL,
                         "sequence %u would reach position %llu, the model has %u positions", index,
                         (unsigned long long)end, info->max_positions);
    if ((uint64_t)seq->n_pages * KV_PAGE_SIZE < end)
        return error_set(err, EINVAL,
                         "sequence %u has %u KV pages for %llu tokens, %llu are needed", index,
                         seq->n_pages, (unsigned long long)end,
                         (unsigned long long)((end + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE));
    for (uint32_t i = 0; i < seq->n_tokens; i++)
        if (seq->tokens[i] >= info->vocab_size)
            return error_set(err, EINVAL, "token %u of sequence %u is %u, the vocabulary has %u", i,
                             index, seq->tokens[i], info->vocab_size);
    return 0;
}

static int check_step(const struct engine *engine, const struct engine_step *step,
                      uint64_t *ret_tokens, uint32_t *ret_rows, struct error *err)
{
    uint64_t tokens = 0;
    uint32_t rows = 0;

    if (!step->n_seqs)
        return error_set(err, EINVAL, "the step has no sequences");
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        int r = check_seq(engine, &step->seqs[i], i, err);
        for (uint32_t p = 0; r == 0 && p < step->seqs[i].n_pages; p++)
            if (step->seqs[i].pages[p] >= engine->pages)
                r = error_set(err, EINVAL, "sequence %u names KV page %u, there are %u", i,
                              step->seqs[i].pages[p], engine->pages);
        if (r < 0)
            return r;
        tokens += step->seqs[i].n_tokens;
        rows += step->seqs[i].sample;
    }
    *ret_tokens = tokens;
    *ret_rows = step->taps ? (uint32_t)tokens : rows;
    return 0;
}

/* The smallest ready bucket that holds the step. */
static struct bucket *choose_bucket(struct engine *engine, const struct engine_step *step,
                                    uint64_t tokens, uint32_t rows)
{
    struct bucket *best = NULL;

    for (int i = 0; i < BUCKET_COUNT; i++) {
        struct bucket *b = &engine->buckets[i];
        if ((i == BUCKET_TAPS) != step->taps || atomic_load(&b->state) != BUCKET_READY)
            continue;
        if (tokens > b->request.tokens || step->n_seqs > b->request.seqs || rows > b->request.rows)
            continue;
        if (!best || b->request.tokens < best->request.tokens)
            best = b;
    }
    return best;
}

/* Writes the inputs of the step into the staging block; returns how much of it is in use. */
static uint64_t lay_out(uint8_t *staging, const struct step_io *io, const struct engine_step *step,
                        bool all_rows)
{
    struct ember_step_header *header = (struct ember_step_header *)staging;
    int32_t *tokens = (int32_t *)(staging + io->tokens),
            *positions = (int32_t *)(staging + io->positions);
    int32_t *rope_len = (int32_t *)(staging + io->rope_len),
            *seq_of = (int32_t *)(staging + io->seq_of);
    int32_t *kv_slot = (int32_t *)(staging + io->kv_slot), *rows = (int32_t *)(staging + io->rows);
    int32_t *pages = (int32_t *)(staging + io->pages);
    uint32_t n = 0, n_rows = 0;

    for (uint32_t s = 0; s < step->n_seqs; s++) {
        const struct engine_seq *seq = &step->seqs[s];
        for (uint32_t i = 0; i < seq->n_tokens; i++, n++) {
            uint32_t position = seq->position + i;
            tokens[n] = (int32_t)seq->tokens[i];
            positions[n] = (int32_t)position;
            rope_len[n] = (int32_t)(position < seq->prompt_len ? seq->prompt_len : position + 1);
            seq_of[n] = (int32_t)s;
            kv_slot[n] = (int32_t)(seq->pages[position / KV_PAGE_SIZE] * KV_PAGE_SIZE +
                                   position % KV_PAGE_SIZE);
            if (all_rows || (seq->sample && i + 1 == seq->n_tokens))
                rows[n_rows++] = (int32_t)n;
        }
        /* Behind what the tokens can reach a table may be longer than the bucket's row. */
        uint32_t reach = (seq->position + seq->n_tokens + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE;
        memcpy(pages + (size_t)s * io->shape.pages, seq->pages, reach * sizeof *pages);
    }
    *header = (struct ember_step_header){.n_tokens = n, .n_seqs = step->n_seqs, .n_rows = n_rows};
    return io->pages + (uint64_t)step->n_seqs * io->shape.pages * sizeof *pages;
}

int step_run_inputs(struct engine *engine, struct bucket *bucket, const struct engine_step *step,
                    uint32_t *ret_rows, struct error *err)
{
    struct ember_backend_error e = {0};
    uint64_t used = lay_out(engine->staging, &bucket->plan->io, step, step->taps);

    int r = engine->backend->copy_in(engine->queue, engine->memory[EMBER_ARENA_IO], 0,
                                     engine->staging, used, &e);
    if (r < 0)
        return backend_fail(engine->backend, r, &e, err);
    *ret_rows = ((struct ember_step_header *)engine->staging)->n_rows;
    return 0;
}

/* Makes *buffer at least `need` bytes. */
static int grow(float **buffer, uint64_t *have, uint64_t need, struct error *err)
{
    if (*have >= need)
        return 0;
    void *p = mem_alloc(need, 1);
    if (!p)
        return error_set(err, ENOMEM, "no memory for %llu bytes of results",
                         (unsigned long long)need);
    free(*buffer);
    *buffer = p;
    *have = need;
    return 0;
}

static int read_back(struct engine *engine, const struct bucket *bucket,
                     const struct engine_step *step, uint32_t rows, struct error *err)
{
    const struct ember_backend *backend = engine->backend;
    const struct step_io *io = &bucket->plan->io;
    struct ember_memory *memory = engine->memory[EMBER_ARENA_IO];
    struct ember_backend_error e = {0};
    uint64_t logits = (uint64_t)rows * io->shape.vocab * sizeof(float);
    uint64_t hidden =
        (uint64_t)io->shape.taps * io->shape.tokens * io->shape.hidden * sizeof(float);
    int r = 0;

    if (rows)
        r = backend->copy_out(engine->queue, engine->sampled, memory, io->sampled,
                              rows * sizeof *engine->sampled, &e);
    if (r == 0 && rows && (step->logits || step->taps)) {
        if ((r = grow(&engine->logits, &engine->logits_bytes, logits, err)) < 0)
            return r;
        r = backend->copy_out(engine->queue, engine->logits, memory, io->logits, logits, &e);
    }
    if (r == 0 && step->taps) {
        if ((r = grow(&engine->hidden, &engine->hidden_bytes, hidden, err)) < 0)
            return r;
        r = backend->copy_out(engine->queue, engine->hidden, memory, io->hidden, hidden, &e);
    }
    return r < 0 ? backend_fail(backend, r, &e, err) : 0;
}

static int run(struct engine *engine, struct bucket *bucket, const struct engine_step *step,
               uint32_t *ret_rows, struct error *err)
{
    struct ember_backend_error e = {0};

    int r = step_run_inputs(engine, bucket, step, ret_rows, err);
    if (r == 0)
        r = engine->early ? preload_run(engine, bucket, err)
                          : graph_exec_run(bucket->exec, engine->queue, err);
    bucket->profile_runs++;
    if (r == 0)
        r = read_back(engine, bucket, step, *ret_rows, err);
    /* Also after a failure: copies that were enqueued still use our buffers. */
    int synced = engine->backend->queue_sync(engine->queue, &e);
    if (r == 0 && synced < 0)
        r = backend_fail(engine->backend, synced, &e, err);
    return r;
}

int engine_step(struct engine *engine, const struct engine_step *step, struct engine_result *ret,
                struct error *err)
{
    uint64_t start = clock_ns(), tokens = 0;
    uint32_t rows = 0;

    if (engine->broken.code) {
        if (err)
            *err = engine->broken;
        return engine->broken.code;
    }
    int r = check_step(engine, step, &tokens, &rows, err);
    if (r < 0)
        return r;
    struct bucket *bucket = choose_bucket(engine, step, tokens, rows);
    if (!bucket) {
        struct engine_limits limits = engine_limits(engine);
        return error_set(
            err, E2BIG, "a step of %llu tokens in %u sequences; this instance takes %u in %u now",
            (unsigned long long)tokens, step->n_seqs, limits.max_tokens, limits.max_seqs);
    }
    r = run(engine, bucket, step, &rows, err);
    if (r == 0 && engine->early) /* the result is in buffers of our own */
        r = preload_finish(engine, err);
    if (r < 0)
        return r;
    *ret = (struct engine_result){.n_rows = rows,
                                  .greedy = engine->sampled,
                                  .logits = step->logits || step->taps ? engine->logits : NULL,
                                  .hidden = step->taps ? engine->hidden : NULL,
                                  .compute_ms = clock_ms_since(start)};
    return 0;
}
