/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which instance a waiting sequence is meant for. Among those with a free seat and enough pages,
 * the one where least is to be computed before it can decode: its own tokens that are not cached
 * there, the prompt tokens that are ahead of it, and SEAT_COST for each sequence that shares the
 * steps. So a cached prefix wins until the load there outweighs it. When none has room the sequence
 * stays in its client's list, and the first instance that gets room takes whoever is next.
 *
 * A quarter of a step's tokens is for prompts: where an instance takes no more tokens than
 * sequences, streams alone would fill all steps, and a newcomer's prompt would trickle in by one or
 * two tokens. While others wait, one seat of many is kept for a client that has nothing running:
 * its first sequence can join a step that is planned already, where nobody could be displaced any
 * more.
 */
#include "scheduler/sched_private.h"

/* Prompt tokens that one more running sequence is worth. */
#define SEAT_COST 16
/* A seat is kept of so many. */
#define KEEP_OF 32

uint32_t route_hits(const struct sched_instance *instance, const struct seq *seq)
{
    uint32_t size = instance->model->config.page_size, blocks = seq_shareable(seq), b = 0;

    while (b < blocks && kvpages_find(instance->pages, &seq->hashes[b],
                                      seq->tokens + (size_t)b * size) != KVPAGE_NONE)
        b++;
    return b;
}

bool route_fits(const struct sched_instance *instance, uint32_t n_known, bool samples)
{
    return pages_for(instance->model, n_known) <= instance->limits.pages &&
           (uint64_t)n_known + samples <= instance->limits.max_positions;
}

bool route_fits_any(const struct sched_model *model, uint32_t n_known, bool samples)
{
    for (uint32_t i = 0; i < model->n_instances; i++)
        if (route_fits(model->instances[i], n_known, samples))
            return true;
    return false;
}

uint32_t route_seats(const struct sched_instance *instance, const struct seq *seq)
{
    const struct sched_model *model = instance->model;
    uint32_t own = model->config.step_tokens, tokens = instance->limits.max_tokens;

    tokens = own ? MIN(own, tokens) : tokens;
    uint32_t seats = MIN(instance->limits.max_seqs, tokens - tokens / 4); /* each is a token */
    return seats - (instance->limits.joins && seats >= KEEP_OF && model->n_waiting > 1 &&
                    seq->request->client->running);
}

static bool has_room(const struct sched_instance *instance, const struct seq *seq)
{
    uint64_t need = (uint64_t)instance->waiting_pages + pages_for(instance->model, seq->n_known);

    return !instance->draining && !instance->gone &&
           instance->n_running + instance->waiting.n < route_seats(instance, seq) &&
           need <= kvpages_available(instance->pages) &&
           route_fits(instance, seq->n_known, seq->request->max_tokens > 0);
}

void route(struct seq *seq)
{
    struct sched_model *model = seq->request->model;
    struct sched_instance *best = NULL;
    uint64_t least = UINT64_MAX;

    for (uint32_t i = 0; i < model->n_instances; i++) {
        struct sched_instance *instance = model->instances[i];
        if (!has_room(instance, seq))
            continue;
        uint64_t seats = (uint64_t)instance->n_running + instance->waiting.n;
        uint64_t cost = instance->work + SEAT_COST * seats + seq->n_known;
        if (cost - seq->n_known >= least)
            continue; /* even if all of it were cached */
        cost -= (uint64_t)route_hits(instance, seq) * model->config.page_size;
        if (cost < least) {
            least = cost;
            best = instance;
        }
    }
    queue_push(seq, best);
    if (best)
        instance_ready(best);
    else if (model->n_instances &&
             !route_fits_any(model, seq->n_known, seq->request->max_tokens > 0))
        model->next_deadline = 0; /* sched_tick tells it */
}

void route_return(struct sched_instance *instance)
{
    struct sched_model *model = instance->model;

    while (instance->waiting.head) {
        struct seq *seq = instance->waiting.head;
        queue_pull(seq);
        queue_push(seq, NULL);
    }
    for (uint32_t i = 0; i < model->n_instances; i++)
        if (!model->instances[i]->n_running && !model->instances[i]->draining)
            instance_ready(model->instances[i]);
}
