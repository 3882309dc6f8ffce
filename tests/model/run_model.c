/* SPDX-License-Identifier: Apache-2.0 */
#include "run_model.h"

#include <errno.h>
#include <string.h>

#include "kernels/ref/ref.h"

static int fill_weights(struct run_model *run, struct error *err)
{
    _cleanup_free_ struct weight_run *runs = NULL;
    size_t n;
    int r = weights_layout_runs(run->layout, 1000, &runs, &n, err); /* ends inside rows */
    for (size_t i = 0; r == 0 && i < n; i++)
        r = weight_run_read(run->checkpoint, run->layout, &runs[i], run->weights + runs[i].to, err);
    return r;
}

int run_model_open(const char *dir, uint32_t max_tokens, struct run_model *run, struct error *err)
{
    const char *config;
    size_t len;
    int r;
    *run = (struct run_model){.n_pages = (max_tokens + KV_PAGE_SIZE - 1) / KV_PAGE_SIZE + 3};
    if ((r = checkpoint_open(dir, &run->checkpoint, err)) < 0)
        return r;
    config = checkpoint_config(run->checkpoint, &len);
    if ((r = model_from_config(config, len, dir, &run->model, err)) < 0 ||
        (r = model_layout(run->model, run->checkpoint, NULL, &run->layout, err)) < 0)
        return r;
    run->weights = mem_alloc(run->layout->bytes, 1);
    run->kv = mem_alloc(run->n_pages, model_info(run->model)->kv_page_bytes[KV_F32]);
    if (!run->weights || !run->kv)
        return error_set(err, ENOMEM, "no memory for %s", dir);
    return fill_weights(run, err);
}

void run_model_close(struct run_model *run)
{
    plan_free(run->plan);
    weights_layout_free(run->layout);
    model_free(run->model);
    checkpoint_free(run->checkpoint);
    free(run->weights);
    free(run->kv);
    free(run->scratch);
    free(run->io);
    *run = (struct run_model){0};
}

static int make_plan(struct run_model *run, uint32_t bucket, bool taps, struct error *err)
{
    struct plan_request request = {.tokens = bucket, .seqs = 2, .rows = bucket, .taps = taps};
    int r;
    if (run->plan && run->plan_tokens == bucket && !taps == !run->plan->io.shape.taps)
        return 0;
    plan_free(run->plan);
    run->plan = NULL;
    free(run->scratch);
    free(run->io);
    run->scratch = run->io = NULL;
    r = model_plan(run->model, run->layout, &request, &run->plan, err);
    if (r < 0)
        return r;
    run->plan_tokens = bucket;
    run->scratch = mem_alloc(run->plan->arena_bytes[EMBER_ARENA_SCRATCH], 1);
    run->io = mem_alloc(run->plan->arena_bytes[EMBER_ARENA_IO], 1);
    return run->scratch && run->io ? 0 : error_set(err, ENOMEM, "no memory for a plan");
}

/* Sequence page i lies in page n - 1 - i. */
static int32_t page_of(const struct run_model *run, uint32_t i)
{
    return (int32_t)(run->n_pages - 1 - i);
}

static void fill_inputs(struct run_model *run, const int32_t *tokens, uint32_t n, uint32_t first,
                        uint32_t prompt_len)
{
    const struct step_io *io = &run->plan->io;
    *(struct ember_step_header *)run->io =
        (struct ember_step_header){.n_tokens = n, .n_seqs = 2, .n_rows = n};
    memset(run->scratch, 0xff, run->plan->arena_bytes[EMBER_ARENA_SCRATCH]); /* NaN */
    for (uint32_t i = 0; i < n; i++) {
        uint32_t p = first + i;
        ((int32_t *)(run->io + io->tokens))[i] = tokens[i];
        ((int32_t *)(run->io + io->positions))[i] = (int32_t)p;
        ((int32_t *)(run->io + io->rope_len))[i] = (int32_t)(p < prompt_len ? prompt_len : p + 1);
        ((int32_t *)(run->io + io->seq_of))[i] = 1;
        ((int32_t *)(run->io + io->kv_slot))[i] =
            page_of(run, p / KV_PAGE_SIZE) * KV_PAGE_SIZE + (int32_t)(p % KV_PAGE_SIZE);
        ((int32_t *)(run->io + io->rows))[i] = (int32_t)i;
    }
    for (uint32_t i = 0; i < run->n_pages && i < io->shape.pages; i++)
        ((int32_t *)(run->io + io->pages))[io->shape.pages + i] = page_of(run, i);
}

int run_model_step(struct run_model *run, uint32_t bucket, const int32_t *tokens, uint32_t n,
                   uint32_t first, uint32_t prompt_len, bool taps, struct error *err)
{
    void *arenas[EMBER_ARENA_COUNT];
    int r = make_plan(run, bucket, taps, err);
    if (r < 0)
        return r;
    fill_inputs(run, tokens, n, first, prompt_len);
    arenas[EMBER_ARENA_WEIGHTS] = run->weights;
    arenas[EMBER_ARENA_KV] = run->kv;
    arenas[EMBER_ARENA_STATE] = NULL;
    arenas[EMBER_ARENA_SCRATCH] = run->scratch;
    arenas[EMBER_ARENA_IO] = run->io;
    for (uint32_t i = 0; i < run->plan->n_ops; i++)
        if ((r = ref_op(&run->plan->ops[i], arenas)) < 0)
            return error_set(err, -r, "op %u", i);
    return 0;
}

const float *run_model_logits(const struct run_model *run, uint32_t row)
{
    return (const float *)(run->io + run->plan->io.logits) +
           (size_t)row * run->plan->io.shape.vocab;
}

const float *run_model_hidden(const struct run_model *run, uint32_t layer, uint32_t row)
{
    const struct step_shape *s = &run->plan->io.shape;
    return (const float *)(run->io + run->plan->io.hidden) +
           ((size_t)layer * s->tokens + row) * s->hidden;
}

int32_t run_model_sampled(const struct run_model *run, uint32_t row)
{
    return ((const int32_t *)(run->io + run->plan->io.sampled))[row];
}
