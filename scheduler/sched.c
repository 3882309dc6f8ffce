/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler as a whole: models, requests, deadlines. */
#include "scheduler/sched_private.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define SECOND 1e9
/* The configured speed weighs as much as so long a measurement. */
#define PRIOR_NS 1e8

const char *sched_reason_text(enum sched_reason reason)
{
    static const char *const texts[] = {
#define X(name, text) text,
        SCHED_REASONS(X)
#undef X
    };
    return texts[reason];
}

void sched_emit(struct sched *sched, const struct sched_event *event)
{
    if (sched->config.event)
        sched->config.event(sched->config.context, event);
}

int sched_new(const struct sched_config *config, struct sched **ret, struct error *err)
{
    _cleanup_free_ struct sched *sched = mem_alloc(1, sizeof *sched);

    if (!sched)
        return error_set(err, ENOMEM, "no memory for a scheduler");
    sched->config = *config;
    sched->ready_tail = &sched->ready;
    sched->mask = 63;
    sched->buckets = mem_alloc(sched->mask + 1, sizeof(struct request *));
    if (!sched->buckets)
        return error_set(err, ENOMEM, "no memory for a scheduler");
    *ret = TAKE(sched);
    return 0;
}

/* ---- models ---- */

double model_speed(const struct sched_model *model)
{
    return model->speed_tokens / model->speed_ns * SECOND;
}

uint64_t model_backlog(const struct sched_model *model)
{
    return model->backlog + (uint64_t)(model->n_waiting * model->mean_output);
}

static void model_free(struct sched_model *model)
{
    for (struct request *r = model->requests, *next; r; r = next) {
        next = r->next;
        request_free(r);
    }
    for (uint32_t i = 0; i < model->n_instances; i++)
        instance_free(model->instances[i]);
    free(model->instances);
    clients_free(model);
    free((void *)model->config.stop_ids);
    free(model);
}

void sched_free(struct sched *sched)
{
    if (!sched)
        return;
    for (struct sched_model *m = sched->models, *next; m; m = next) {
        next = m->next;
        for (uint32_t i = 0; i < m->n_instances; i++) /* requests that only a step still names */
            for (uint32_t f = 0; f < m->instances[i]->n_flights; f++)
                for (uint32_t k = 0; k < m->instances[i]->flights[f].n; k++) {
                    struct request *r = m->instances[i]->flights[f].entries[k]->request;
                    if (r->forgotten)
                        request_drop(r);
                }
        model_free(m);
    }
    free(sched->buckets);
    free(sched);
}

#define DEFAULT(member, value)                                                                     \
    do {                                                                                           \
        if (!(member))                                                                             \
            (member) = (value);                                                                    \
    } while (0)

static void set_defaults(struct sched_model_config *config)
{
    DEFAULT(config->max_queue, 1024);
    DEFAULT(config->output_weight, 2);
    DEFAULT(config->rope_exact_len, UINT32_MAX);
    DEFAULT(config->stall_ns, UINT64_C(30000000000));
    DEFAULT(config->max_instances, 1);
    DEFAULT(config->wait_target_ns, UINT64_C(1000000000));
    DEFAULT(config->backlog_target_ns, UINT64_C(5000000000));
    DEFAULT(config->idle_ns, UINT64_C(60000000000));
    DEFAULT(config->spawn_ns, UINT64_C(100000000));
    if (!(config->tokens_per_s > 0))
        config->tokens_per_s = 1000;
}

/* A copy of n tokens; n 0 is NULL. */
static bool copy_ids(const uint32_t *ids, uint32_t n, uint32_t **ret)
{
    *ret = NULL;
    if (!n)
        return true;
    *ret = mem_alloc(n, sizeof *ids);
    if (*ret)
        memcpy(*ret, ids, n * sizeof *ids);
    return *ret;
}

int sched_model_add(struct sched *sched, const struct sched_model_config *config,
                    struct sched_model **ret, struct error *err)
{
    _cleanup_free_ struct sched_model *model = NULL;
    uint32_t *ids;

    if (!config->page_size || config->page_size > KVHASH_MAX_TOKENS)
        return error_set(err, EINVAL, "KV pages of %u tokens: 1 to %d", config->page_size,
                         KVHASH_MAX_TOKENS);
    model = mem_alloc(1, sizeof *model);
    if (!model || !copy_ids(config->stop_ids, config->n_stop_ids, &ids))
        return error_set(err, ENOMEM, "no memory for a model");
    model->sched = sched;
    model->config = *config;
    model->config.stop_ids = ids;
    set_defaults(&model->config);
    model->speed_ns = PRIOR_NS;
    model->speed_tokens = model->config.tokens_per_s * PRIOR_NS / SECOND;
    model->next_deadline = UINT64_MAX;
    pace_init(model);
    model->next = sched->models;
    sched->models = model;
    *ret = TAKE(model);
    return 0;
}

void sched_model_remove(struct sched_model *model, uint64_t now)
{
    struct sched_model **at = &model->sched->models;

    while (model->requests)
        request_end(model->requests, SCHED_CANCELLED, NULL, now);
    while (model->n_instances)
        sched_instance_gone(model->instances[0], false, now);
    while (*at != model)
        at = &(*at)->next;
    *at = model->next;
    model_free(model);
}

/* ---- requests: by id, by model ---- */

static struct request *find(const struct sched *sched, uint64_t id)
{
    struct request *r = sched->buckets[id & sched->mask];
    while (r && r->id != id)
        r = r->chain;
    return r;
}

/* Twice as many buckets; without memory the chains just get longer. */
static void more_buckets(struct sched *sched)
{
    uint32_t mask = sched->mask * 2 + 1;
    struct request **moved = mem_alloc((size_t)mask + 1, sizeof(struct request *));

    if (!moved)
        return;
    for (uint32_t b = 0; b <= sched->mask; b++) {
        for (struct request *r = sched->buckets[b], *next; r; r = next) {
            next = r->chain;
            r->chain = moved[r->id & mask];
            moved[r->id & mask] = r;
        }
    }
    free(sched->buckets);
    sched->buckets = moved;
    sched->mask = mask;
}

static void link_request(struct request *request)
{
    struct sched_model *model = request->model;
    struct sched *sched = model->sched;

    if (sched->n_requests++ > sched->mask && sched->mask < UINT32_MAX / 4)
        more_buckets(sched);
    request->chain = sched->buckets[request->id & sched->mask];
    sched->buckets[request->id & sched->mask] = request;
    request->next = model->requests;
    *(request->next ? &request->next->prev : &model->oldest_request) = request;
    model->requests = request;
}

void request_free(struct request *request)
{
    for (uint32_t i = 0; i < request->n; i++) {
        free(request->seqs[i].tokens);
        free(request->seqs[i].hashes);
        free(request->seqs[i].pages);
    }
    free(request->stop_ids);
    free(request);
}

void request_drop(struct request *request)
{
    assert(request->holds);
    if (!--request->holds && request->forgotten)
        request_free(request);
}

void request_forget(struct request *request)
{
    struct sched_model *model = request->model;
    struct sched *sched = model->sched;
    struct request **at = &sched->buckets[request->id & sched->mask];

    while (*at != request)
        at = &(*at)->chain;
    *at = request->chain;
    sched->n_requests--;
    *(request->prev ? &request->prev->next : &model->requests) = request->next;
    *(request->next ? &request->next->prev : &model->oldest_request) = request->prev;
    request->forgotten = true; /* the caller holds it */
    model->counters.ended++;
    sched_emit(sched, &(struct sched_event){
                          .kind = SCHED_DONE, .request = request->id, .user = request->user});
}

void request_end(struct request *request, enum sched_reason reason, const char *text, uint64_t now)
{
    request->holds++;
    for (uint32_t i = request->n; i-- > 0;) /* the first last: it would unblock the others */
        if (request->seqs[i].state != SEQ_ENDED)
            seq_end(&request->seqs[i], reason, text, now);
    request_drop(request);
}

void sched_cancel(struct sched *sched, uint64_t id, uint64_t now)
{
    struct request *request = find(sched, id);
    if (request)
        request_end(request, SCHED_CANCELLED, NULL, now);
}

void sched_stop(struct sched *sched, uint64_t id, uint32_t choice, uint64_t now)
{
    struct request *request = find(sched, id);
    if (request && choice < request->n && request->seqs[choice].state != SEQ_ENDED)
        seq_end(&request->seqs[choice], SCHED_STOP, NULL, now);
}

/* ---- submitting ---- */

static uint32_t retry_after(const struct sched_model *model)
{
    double seconds =
        (double)model_backlog(model) / (model_speed(model) * MAX(model->n_instances, 1));

    if (!model->n_instances)
        seconds += (double)model->config.spawn_ns / SECOND;
    return (uint32_t)fmin(60, fmax(1, ceil(seconds)));
}

static int check(const struct sched_request *request, struct error *err)
{
    const struct sched_model *model = request->model;

    if (!request->n_prompt || !request->prompt)
        return error_set(err, EINVAL, "the prompt is empty");
    if (request->n > MAX_CHOICES)
        return error_set(err, EINVAL, "n is %u, at most %d choices", request->n, MAX_CHOICES);
    if (request->n_prompt > UINT32_MAX / 8)
        return error_set(err, E2BIG, "a prompt of %u tokens", request->n_prompt);
    if (model->n_instances && !route_fits_any(model, request->n_prompt, request->max_tokens > 0))
        return error_set(err, E2BIG,
                         "a prompt of %u tokens, and one more, does not fit: an instance has %u "
                         "positions and KV pages for %llu tokens",
                         request->n_prompt, model->instances[0]->limits.max_positions,
                         (unsigned long long)model->instances[0]->limits.pages *
                             model->config.page_size);
    return 0;
}

static struct digest root_of(const struct sched_request *request, uint64_t id)
{
    const struct sched_model *model = request->model;
    uint32_t length = request->n_prompt > model->config.rope_exact_len ? request->n_prompt : 0;

    if (model->config.no_prefix_cache) /* nobody else's: its own choices share */
        return kvhash_root(model->sched->config.hash_seed, length, &id, sizeof id);
    return kvhash_root(model->sched->config.hash_seed, length, request->cache_salt,
                       request->cache_salt_len);
}

static bool fill(struct request *request, const struct sched_request *from)
{
    for (uint32_t i = 0; i < request->n; i++) {
        struct seq *seq = &request->seqs[i];
        seq->request = request;
        seq->choice = i;
        seq->state = SEQ_BLOCKED;
        seq->n_known = seq->cap_tokens = from->n_prompt;
        if (!copy_ids(from->prompt, from->n_prompt, &seq->tokens))
            return false;
    }
    return copy_ids(from->stop_ids, from->n_stop_ids, &request->stop_ids);
}

static struct request *make(const struct sched_request *from, uint32_t n)
{
    struct request *request = mem_alloc(1, sizeof *request + n * sizeof request->seqs[0]);

    if (!request)
        return NULL;
    request->n = n;
    request->model = from->model;
    if (!fill(request, from)) {
        request_free(request);
        return NULL;
    }
    request->id = ++from->model->sched->next_request;
    request->n_live = n;
    request->priority = from->priority;
    request->n_prompt = from->n_prompt;
    request->min_tokens = from->min_tokens;
    request->max_tokens = MIN(from->max_tokens, UINT32_MAX / 8);
    request->n_stop_ids = from->n_stop_ids;
    request->ignore_eos = from->ignore_eos;
    request->prompt_logprobs = from->prompt_logprobs;
    request->root = root_of(from, request->id);
    request->sampling = from->sampling;
    request->deadline = from->deadline;
    request->user = from->user;
    return request;
}

int sched_submit(struct sched *sched, const struct sched_request *from, uint64_t now,
                 uint64_t *ret_id, uint32_t *ret_retry_s, struct error *err)
{
    struct sched_model *model = from->model;
    uint32_t n = MAX(from->n, 1);
    int rc = check(from, err);

    if (rc < 0)
        return rc;
    if ((uint64_t)model->n_waiting + n > model->config.max_queue) {
        model->counters.refused++;
        *ret_retry_s = retry_after(model);
        return SCHED_FULL;
    }
    struct client *client = client_get(model, from->client);
    struct request *request = client ? make(from, n) : NULL;
    if (!request)
        return error_set(err, ENOMEM, "no memory for a request of %u tokens", from->n_prompt);
    request->client = client;
    link_request(request);
    for (uint32_t i = 0; i < n; i++) {
        client_join(model, client);
        request->seqs[i].waiting_since = now;
    }
    model->n_waiting += n;
    model->counters.submitted++;
    if (request->deadline)
        model->next_deadline = MIN(model->next_deadline, request->deadline);
    seq_unblock(&request->seqs[0], now);
    *ret_id = request->id;
    return 0;
}

/* ---- time ---- */

static bool begun(const struct request *request)
{
    for (uint32_t i = 0; i < request->n; i++)
        if (request->seqs[i].begun)
            return true;
    return false;
}

/* One of its sequences waits for an instance that there is not. */
static bool is_too_long(const struct request *request)
{
    for (uint32_t i = 0; i < request->n; i++)
        if (request->seqs[i].state == SEQ_QUEUED &&
            !route_fits_any(request->model, request->seqs[i].n_known, request->max_tokens > 0))
            return true;
    return false;
}

/*
 * A request that has run out of time, or fits no instance (any more); NULL: none. From the oldest
 * on: of many that are late together, each is found at once.
 */
static struct request *overdue(struct sched_model *model, uint64_t now, enum sched_reason *reason)
{
    for (struct request *r = model->oldest_request; r; r = r->prev) {
        bool waits = !begun(r);
        if (waits && r->deadline && now >= r->deadline) {
            *reason = SCHED_TIMEOUT;
            return r;
        }
        if (model->n_instances && is_too_long(r)) {
            *reason = waits ? SCHED_TOO_LONG : SCHED_ERROR;
            return r;
        }
        if (waits && r->deadline)
            model->next_deadline = MIN(model->next_deadline, r->deadline);
    }
    return NULL;
}

static void expire(struct sched_model *model, uint64_t now)
{
    enum sched_reason reason = SCHED_TIMEOUT;
    struct request *request;

    if (now < model->next_deadline)
        return;
    model->next_deadline = UINT64_MAX;
    while ((request = overdue(model, now, &reason)))
        request_end(request, reason,
                    reason == SCHED_TIMEOUT ? "no instance could begin it before its deadline"
                                            : "its tokens fit no instance",
                    now);
}

static void watch(struct sched_instance *instance, uint64_t now, uint64_t *next)
{
    struct flight *flight = &instance->flights[0];

    if (!instance->n_flights || flight->stalled)
        return;
    uint64_t due = MAX(flight->planned_at, instance->last_done);
    if (!size_add(due, instance->model->config.stall_ns, &due))
        return;
    if (now < due) {
        *next = MIN(*next, due);
        return;
    }
    flight->stalled = true;
    sched_emit(
        instance->model->sched,
        &(struct sched_event){.kind = SCHED_STALLED, .user = instance->user, .instance = instance});
}

void sched_tick(struct sched *sched, uint64_t now, uint64_t *ret_next)
{
    uint64_t next = UINT64_MAX;

    for (struct sched_model *model = sched->models; model; model = model->next) {
        expire(model, now);
        next = MIN(next, model->next_deadline);
        for (uint32_t i = 0; i < model->n_instances; i++)
            watch(model->instances[i], now, &next);
    }
    *ret_next = next;
}
