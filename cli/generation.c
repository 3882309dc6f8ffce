/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/generation.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"

#define SPAWN_TIMEOUT_MS 600000 /* a cold model is loaded first */
#define STEP_TIMEOUT_MS 120000

static int lease(struct generation *g, struct error *err)
{
    uint64_t start = clock_ns();
    int r = control_spawn(g->control, g->options.model, SPAWN_TIMEOUT_MS, &g->spawned, err);

    if (r == 0) {
        g->spawn_ms = clock_ms_since(start);
        r = step_client_open(g->spawned->instance->socket, g->spawned->lease->token, &g->client,
                             err);
    }
    return r;
}

static void release(struct generation *g, bool keep_warm)
{
    step_client_free(TAKE(g->client));
    if (!g->spawned)
        return;
    control_release(g->control, g->spawned->instance->id, keep_warm);
    protobuf_c_message_free_unpacked(&g->spawned->base, NULL);
    g->spawned = NULL;
}

int generation_begin(struct generation *g, struct control *control,
                     const struct generation_options *options, struct error *err)
{
    *g = (struct generation){.control = control, .options = *options, .started_ns = clock_ns()};
    int r = lease(g, err);
    if (r < 0)
        release(g, false);
    return r;
}

void generation_end(struct generation *g, bool keep_warm)
{
    release(g, keep_warm);
    free(g->tokens);
    g->tokens = NULL;
}

int generation_prompt(struct generation *g, const uint32_t *ids, size_t n, struct error *err)
{
    const Ember__V1__Welcome *w = step_client_welcome(g->client);
    uint64_t room = MIN(w->max_positions, (uint64_t)w->pages * w->page_size);

    if (!n)
        return error_set(err, EINVAL, "the prompt is empty");
    if (n >= room)
        return error_set(err, EINVAL,
                         "the prompt has %zu tokens; model and KV memory leave room for %llu", n,
                         (unsigned long long)room);
    g->capacity = (uint32_t)MIN(room, n + g->options.max_tokens);
    g->tokens = mem_alloc(g->capacity, sizeof *g->tokens);
    if (!g->tokens)
        return error_set(err, ENOMEM, "no memory for %u tokens", g->capacity);
    memcpy(g->tokens, ids, n * sizeof *ids);
    g->n_prompt = g->n_tokens = (uint32_t)n;
    return 0;
}

/* Runs tokens [from, to) and, when to is all there is, takes the next. */
static int run(struct generation *g, uint32_t from, uint32_t to, uint32_t *ret_token,
               struct error *err)
{
    const Ember__V1__Welcome *w = step_client_welcome(g->client);
    uint32_t n_pages = (to + w->page_size - 1) / w->page_size;
    _cleanup_free_ uint32_t *pages = mem_alloc(n_pages, sizeof *pages);
    Ember__V1__Sampling sampling = EMBER__V1__SAMPLING__INIT;
    Ember__V1__SequenceStep seq = EMBER__V1__SEQUENCE_STEP__INIT, *seqs[] = {&seq};
    Ember__V1__Step step = EMBER__V1__STEP__INIT;
    const Ember__V1__StepResult *result;

    if (!pages)
        return error_set(err, ENOMEM, "no memory for %u page numbers", n_pages);
    for (uint32_t i = 0; i < n_pages; i++)
        pages[i] = i;
    sampling.temperature = g->options.temperature;
    sampling.top_k = g->options.top_k;
    sampling.top_p = g->options.top_p;
    sampling.min_p = g->options.min_p;
    sampling.seed = g->options.seed;
    seq.n_tokens = to - from;
    seq.tokens = g->tokens + from;
    seq.position = from;
    seq.prompt_len = g->n_prompt;
    seq.n_pages = n_pages;
    seq.pages = pages;
    seq.sample = to == g->n_tokens;
    seq.sample_index = g->n_tokens - g->n_prompt;
    seq.sampling = &sampling;
    step.id = g->n_tokens;
    step.n_sequences = 1;
    step.sequences = seqs;
    int r = step_client_run(g->client, &step, STEP_TIMEOUT_MS, &result, err);
    if (r < 0 || !seq.sample)
        return r;
    if (result->n_sequences != 1)
        return error_set(err, EPROTO, "the instance returned %zu sequences instead of 1",
                         result->n_sequences);
    *ret_token = result->sequences[0]->token;
    return 0;
}

/* From `from` on in steps that the instance takes; fills pages that a new instance lacks as well.
 */
static int advance(struct generation *g, uint32_t from, uint32_t *ret_token, struct error *err)
{
    uint32_t chunk = step_client_welcome(g->client)->max_tokens;
    int r = 0;

    while (from < g->n_tokens && r == 0) {
        uint32_t to = MIN(g->n_tokens, from + MAX(chunk, 1u));
        r = run(g, from, to, ret_token, err);
        from = to;
    }
    return r;
}

static bool is_end(const struct generation *g, uint32_t token)
{
    const Ember__V1__Welcome *w = step_client_welcome(g->client);

    for (size_t i = 0; i < w->n_eos_ids; i++)
        if (w->eos_ids[i] >= 0 && (uint32_t)w->eos_ids[i] == token)
            return !g->options.ignore_eos;
    return false;
}

int generation_next(struct generation *g, uint32_t *ret_token, struct error *err)
{
    uint32_t token = 0, from = g->n_tokens == g->n_prompt ? 0 : g->n_tokens - 1;

    if (g->n_tokens == g->capacity)
        return 1;
    for (;;) {
        int r = g->client ? advance(g, from, &token, err) : -EPIPE;
        if (r == 0)
            break;
        if (r != -EPIPE || ++g->deaths >= GENERATION_DEATHS_MAX)
            return r;
        release(g, false);
        r = lease(g, err);
        if (r < 0)
            return r;
        g->replays++;
        from = 0;
    }
    g->deaths = 0;
    if (g->n_tokens == g->n_prompt)
        g->first_token_ms = clock_ms_since(g->started_ns);
    g->tokens[g->n_tokens++] = token;
    *ret_token = token;
    return is_end(g, token) ? 1 : 0;
}
