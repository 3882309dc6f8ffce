/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/perplexity.h"

#include <errno.h>
#include <math.h>

#include "engine/sample.h"
#include "kernels/plan.h"

#define WINDOW_DEFAULT 512

struct run {
    struct engine *engine;
    const struct perplexity_options *options;
    uint32_t *pages;
    uint32_t window, n_pages;
    struct perplexity sum;
};

/* -ln p of the tokens behind those of a step; the window's last has none behind it. */
static void count(struct run *run, const uint32_t *ids, uint32_t n, uint32_t left,
                  const struct engine_result *result)
{
    uint32_t vocab = engine_model(run->engine)->vocab_size;
    for (uint32_t i = 0; i < n && i + 1 < left; i++) {
        const float *row = result->logits + (size_t)i * vocab;
        run->sum.loss += logits_norm(row, vocab) - (double)row[ids[i + 1]];
        run->sum.tokens++;
    }
}

static int run_window(struct run *run, const uint32_t *ids, uint32_t n, struct error *err)
{
    struct engine_result result;
    for (uint32_t at = 0; at < n;) {
        struct engine_seq seq = {.tokens = ids + at,
                                 .n_tokens = MIN(PERPLEXITY_STEP, n - at),
                                 .position = at,
                                 .prompt_len = n,
                                 .pages = run->pages,
                                 .n_pages = run->n_pages,
                                 .sample = true};
        struct engine_step step = {.seqs = &seq, .n_seqs = 1, .logits = true, .taps = true};
        int r = engine_step(run->engine, &step, &result, err);
        if (r < 0)
            return r;
        count(run, ids + at, seq.n_tokens, n - at, &result);
        at += seq.n_tokens;
        if (run->options->progress && run->options->progress(run->options->ctx, seq.n_tokens))
            return error_set(err, ECANCELED, "cancelled");
    }
    return 0;
}

static int check(struct run *run, const uint32_t *ids, size_t n, struct error *err)
{
    const struct model_info *info = engine_model(run->engine);
    for (size_t i = 0; i < n; i++)
        if (ids[i] >= info->vocab_size)
            return error_set(err, EINVAL, "token %zu is %u, the model's vocabulary has %u", i,
                             ids[i], info->vocab_size);
    return 0;
}

double perplexity_value(const struct perplexity *p)
{
    return p->tokens ? exp(p->loss / (double)p->tokens) : 0;
}

int perplexity_add(struct engine *engine, const uint32_t *ids, size_t n,
                   const struct perplexity_options *options, struct perplexity *sum,
                   struct error *err)
{
    uint32_t pages = engine_limits(engine).pages;
    uint64_t most = MIN((uint64_t)pages * KV_PAGE_SIZE, engine_model(engine)->max_positions);
    struct run run = {.engine = engine,
                      .options = options,
                      .n_pages = pages,
                      .sum = *sum,
                      .window = options->window ? options->window : WINDOW_DEFAULT};
    _cleanup_free_ uint32_t *numbers = mem_alloc(pages, sizeof *numbers);
    int r = numbers ? check(&run, ids, n, err)
                    : error_set(err, ENOMEM, "no memory for %u page numbers", pages);
    run.window = (uint32_t)MIN(run.window, most);
    run.pages = numbers;
    for (uint32_t i = 0; r == 0 && i < pages; i++)
        numbers[i] = i;
    if (r == 0 && run.window < 2)
        r = error_set(err, EINVAL, "windows of %u tokens have none to predict", run.window);
    for (size_t at = 0; r == 0 && at + 1 < n; at += run.window)
        r = run_window(&run, ids + at, (uint32_t)MIN(run.window, n - at), err);
    if (r == 0)
        *sum = run.sum;
    return r;
}
