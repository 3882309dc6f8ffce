/* SPDX-License-Identifier: Apache-2.0 */
/* Instances: they come, are drained, go. */
#include "scheduler/sched_private.h"

#include <errno.h>
#include <string.h>

/* Sequences of a step that joins another. */
#define JOIN_SEQS 8

static bool limits_ok(const struct sched_model *model, const struct sched_limits *limits,
                      struct error *err)
{
    if (limits->page_size != model->config.page_size)
        error_set(err, EINVAL, "the instance has pages of %u tokens, its model of %u",
                  limits->page_size, model->config.page_size);
    else if (!limits->pages || !limits->max_tokens || !limits->max_seqs || !limits->max_positions)
        error_set(err, EINVAL,
                  "%u pages, %u tokens and %u sequences a step, %u positions: "
                  "none may be 0",
                  limits->pages, limits->max_tokens, limits->max_seqs, limits->max_positions);
    else
        return true;
    return false;
}

static int alloc(struct sched_instance *instance, struct error *err)
{
    uint32_t n = instance->limits.max_seqs;
    int rc = kvpages_new(instance->limits.pages, instance->limits.page_size, &instance->pages, err);

    if (rc < 0)
        return rc;
    instance->running = mem_alloc(n, sizeof(struct seq *));
    instance->hits = mem_alloc(instance->limits.pages, sizeof *instance->hits);
    instance->computing = mem_alloc(n, sizeof(struct seq *));
    bool ok = instance->running && instance->hits && instance->computing;
    for (int i = 0; i < SCHED_FLIGHTS; i++) {
        struct flight *flight = &instance->flights[i];
        flight->cap = i < SCHED_DEPTH ? n : MIN(n, JOIN_SEQS);
        flight->joins = i >= SCHED_DEPTH;
        flight->seqs = mem_alloc(flight->cap, sizeof *flight->seqs);
        flight->entries = mem_alloc(flight->cap, sizeof(struct seq *));
        ok = ok && flight->seqs && flight->entries;
    }
    return ok ? 0 : error_set(err, ENOMEM, "no memory for an instance of %u sequences", n);
}

void instance_free(struct sched_instance *instance)
{
    if (!instance)
        return;
    for (int i = 0; i < SCHED_FLIGHTS; i++) {
        free(instance->flights[i].seqs);
        free(instance->flights[i].entries);
    }
    free(instance->running);
    free(instance->hits);
    free(instance->computing);
    kvpages_free(instance->pages);
    free(instance);
}
DEFINE_CLEANUP(struct sched_instance *, instance_free)

static int join(struct sched_model *model, struct sched_instance *instance, struct error *err)
{
    if (model->n_instances == model->cap_instances) {
        uint32_t cap = MAX(8, model->cap_instances * 2);
        struct sched_instance **moved =
            reallocarray(model->instances, cap, sizeof(struct sched_instance *));
        if (!moved)
            return error_set(err, ENOMEM, "no memory for %u instances", cap);
        model->instances = moved;
        model->cap_instances = cap;
    }
    instance->index = model->n_instances;
    model->instances[model->n_instances++] = instance;
    return 0;
}

int sched_instance_add(struct sched_model *model, const struct sched_limits *limits, void *user,
                       uint64_t now, struct sched_instance **ret, struct error *err)
{
    _cleanup_(instance_freep) struct sched_instance *instance = NULL;

    if (!limits_ok(model, limits, err))
        return -EINVAL;
    instance = mem_alloc(1, sizeof *instance);
    if (!instance)
        return error_set(err, ENOMEM, "no memory for an instance");
    instance->model = model;
    instance->user = user;
    instance->limits = *limits;
    instance->idle_since = instance->last_done = now;
    int rc = alloc(instance, err);
    if (!rc)
        rc = join(model, instance, err);
    if (rc < 0)
        return rc;
    model->surplus_since = 0;
    model->next_deadline = 0; /* sched_tick: who fits none must be told */
    instance_ready(instance);
    *ret = TAKE(instance);
    return 0;
}

void *sched_instance_user(const struct sched_instance *instance)
{
    return instance->user;
}

void sched_instance_grow(struct sched_instance *instance, uint32_t max_tokens)
{
    instance->limits.max_tokens = MAX(instance->limits.max_tokens, max_tokens);
    instance_ready(instance);
}

void sched_instance_drain(struct sched_instance *instance)
{
    instance->draining = true;
    instance->surplus = false;
    route_return(instance);
}

void sched_instance_resume(struct sched_instance *instance)
{
    instance->draining = instance->surplus = false;
    instance_ready(instance);
}

bool sched_instance_idle(const struct sched_instance *instance)
{
    return !instance->n_running && !instance->n_flights && !instance->waiting.n;
}

/* ---- ready ---- */

void instance_ready(struct sched_instance *instance)
{
    struct sched *sched = instance->model->sched;

    if (instance->ready || instance->gone)
        return;
    instance->ready = true;
    instance->ready_next = NULL;
    *sched->ready_tail = instance;
    sched->ready_tail = &instance->ready_next;
}

static void not_ready(struct sched_instance *instance)
{
    struct sched *sched = instance->model->sched;
    struct sched_instance **at = &sched->ready;

    if (!instance->ready)
        return;
    while (*at != instance)
        at = &(*at)->ready_next;
    *at = instance->ready_next;
    if (!*at)
        sched->ready_tail = at;
    instance->ready = false;
}

struct sched_instance *sched_ready(struct sched *sched)
{
    struct sched_instance *first = sched->ready;

    if (first)
        not_ready(first);
    return first;
}

/* ---- going ---- */

/* All leave, to be replayed elsewhere. */
static void empty(struct sched_instance *instance, uint64_t now)
{
    while (instance->n_running) {
        struct seq *seq = instance->running[instance->n_running - 1];
        seq->replayed++;
        instance->model->counters.replays++;
        seq_requeue(seq, now);
    }
    route_return(instance);
}

void sched_instance_gone(struct sched_instance *instance, bool died, uint64_t now)
{
    struct sched_model *model = instance->model;
    struct sched_instance *last = model->instances[--model->n_instances];
    struct seq *guilty = NULL;

    not_ready(instance);
    instance->gone = true;
    model->instances[instance->index] = last;
    last->index = instance->index;
    model->counters.failovers += died && instance->n_running;
    if (died)
        guilty = suspect_death(instance, instance->flights, instance->n_flights,
                               ++model->sched->next_death, true);
    empty(instance, now);
    if (guilty)
        request_end(guilty->request, SCHED_ERROR,
                    "the instance died while it ran this, and so did the one before", now);
    for (uint32_t f = 0; f < instance->n_flights; f++)
        for (uint32_t i = 0; i < instance->flights[f].n; i++)
            request_drop(instance->flights[f].entries[i]->request);
    instance_free(instance);
}
