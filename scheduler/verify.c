/* SPDX-License-Identifier: Apache-2.0 */
/* Figures, and the proof that all the books agree: every number that is kept is counted again. */
#include "scheduler/sched_private.h"

#include <errno.h>

void sched_model_stats(const struct sched_model *model, uint64_t now, struct sched_stats *ret)
{
    struct sched_stats stats = model->counters;

    stats.waiting = model->n_waiting;
    stats.running = model->n_running;
    stats.instances = model->n_instances;
    stats.backlog_tokens = model_backlog(model);
    stats.tokens_per_s = model_speed(model);
    for (uint32_t i = 0; i < model->n_instances; i++) {
        const struct kvpages *pages = model->instances[i]->pages;
        stats.pages += kvpages_count(pages);
        stats.pages_used += kvpages_count(pages) - kvpages_available(pages);
    }
    if (model->oldest && model->oldest->waiting_since < now)
        stats.oldest_wait_ns = now - model->oldest->waiting_since;
    *ret = stats;
}

/* ---- proof ---- */

#define CLAIM(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return error_set(err, EBADMSG, __VA_ARGS__);                                           \
    } while (0)

static int verify_running(const struct sched_instance *instance, uint32_t slot, struct error *err)
{
    const struct seq *seq = instance->running[slot];
    uint32_t size = instance->model->config.page_size;
    unsigned long long id = seq->request->id;

    CLAIM(seq->instance == instance && seq->slot == slot && !seq->list,
          "request %llu: linked wrongly", id);
    CLAIM(seq_runs(seq), "request %llu: runs, but is %s", id, seq_state_text(seq->state));
    if (seq->state == SEQ_PREFILL)
        CLAIM(!seq->pending && seq->planned <= seq->n_known, "request %llu: prefill of %u in %u",
              id, seq->planned, seq->n_known);
    else
        CLAIM(seq->planned == seq->n_known - 1 + seq->pending, "request %llu: %u planned of %u+%u",
              id, seq->planned, seq->n_known, seq->pending);
    CLAIM(seq->done <= seq->planned && seq->pending <= SCHED_DEPTH,
          "request %llu: %u done of %u planned, %u pending", id, seq->done, seq->planned,
          seq->pending);
    CLAIM((uint64_t)seq->n_pages * size >= seq->planned, "request %llu: %u pages for %u tokens", id,
          seq->n_pages, seq->planned);
    for (uint32_t i = seq->done / size; i < seq->n_pages; i++)
        CLAIM(kvpages_refs(instance->pages, seq->pages[i]) == 1,
              "request %llu: page %u is written and shared", id, seq->pages[i]);
    return 0;
}

/* Suspects in flight are of one group, a lone one is there alone. Behind a refusal groups change.
 */
static int verify_company(const struct sched_instance *instance, struct error *err)
{
    const struct seq *first = NULL;
    uint64_t group = 0;
    bool lone = false, mixed = false;

    for (uint32_t f = 0; f < instance->n_flights && !instance->refused; f++) {
        for (uint32_t i = 0; i < instance->flights[f].n; i++) {
            const struct seq *seq = instance->flights[f].entries[i];
            if (seq->id != instance->flights[f].seqs[i].id)
                continue;
            CLAIM(!seq->suspect || !group || seq->suspect == group,
                  "request %llu: a suspect beside another's group",
                  (unsigned long long)seq->request->id);
            group = seq->suspect ? seq->suspect : group;
            lone |= seq->lone;
            mixed |= first && first != seq;
            first = seq;
        }
    }
    CLAIM(!lone || !mixed, "a lone suspect is not alone in flight");
    return 0;
}

static int verify_list(const struct seq_list *list, const struct sched_instance *instance,
                       struct error *err)
{
    uint32_t n = 0;

    for (const struct seq *seq = list->head; seq; seq = seq->next, n++)
        CLAIM(seq->list == list && seq->state == SEQ_QUEUED && seq->instance == instance &&
                  !seq->n_pages && seq->prev == (n ? seq->prev : NULL),
              "request %llu: waits wrongly", (unsigned long long)seq->request->id);
    CLAIM(n == list->n, "a list of %u says %u", n, list->n);
    return 0;
}

static int verify_instance(const struct sched_instance *instance, struct error *err)
{
    const struct sched_model *model = instance->model;
    uint64_t work = 0, pages = 0;
    _cleanup_free_ uint32_t *held = mem_alloc(instance->limits.pages, sizeof *held);

    CLAIM(held, "no memory to verify");
    CLAIM(instance->n_running <= instance->limits.max_seqs, "%u sequences run",
          instance->n_running);
    for (uint32_t i = 0; i < instance->n_running; i++) {
        const struct seq *seq = instance->running[i];
        int rc = verify_running(instance, i, err);
        if (rc < 0)
            return rc;
        for (uint32_t p = 0; p < seq->n_pages; p++)
            held[seq->pages[p]]++;
        work += seq->state == SEQ_PREFILL ? seq->n_known - seq->planned : 0;
    }
    for (const struct seq *seq = instance->waiting.head; seq; seq = seq->next) {
        work += seq->n_known;
        pages += pages_for(model, seq->n_known);
    }
    CLAIM(work == instance->work && pages == instance->waiting_pages,
          "an instance's books: work %llu, counted %llu", (unsigned long long)instance->work,
          (unsigned long long)work);
    uint32_t tokens = 0, seqs = 0;
    for (uint32_t f = 0; f < instance->n_flights; f++) {
        const struct flight *flight = &instance->flights[f];
        tokens = flight->n_tokens + (flight->joins ? tokens : 0);
        seqs = flight->n + (flight->joins ? seqs : 0);
        CLAIM(tokens <= instance->limits.max_tokens && seqs <= instance->limits.max_seqs,
              "a step of %u tokens, %u sequences", tokens, seqs);
    }
    int rc = verify_list(&instance->waiting, instance, err);
    if (!rc)
        rc = verify_company(instance, err);
    return rc < 0 ? rc : kvpages_verify(instance->pages, held, err);
}

static int verify_clients(const struct sched_model *model, struct error *err)
{
    uint32_t running = 0, clients = 0, listed = 0;

    for (size_t b = 0; b < ARRAY_LEN(model->clients); b++) {
        for (const struct client *c = model->clients[b]; c; c = c->next) {
            int rc = verify_list(&c->waiting, NULL, err);
            if (rc < 0)
                return rc;
            running += c->running;
            clients++;
            listed += c->at_waiting != UINT32_MAX;
            CLAIM(!c->waiting.n == (c->at_waiting == UINT32_MAX), "a client is listed wrongly");
            CLAIM(c->at_waiting == UINT32_MAX || model->waiting[c->at_waiting] == c,
                  "a client stands elsewhere");
        }
    }
    CLAIM(running == model->n_running, "%u sequences run, clients have %u", model->n_running,
          running);
    CLAIM(clients == model->n_clients && listed == model->n_waiting_clients,
          "%u clients, %u listed", clients, listed);
    return 0;
}

/* The queue by age holds every QUEUED sequence once, in order. */
static int verify_ages(const struct sched_model *model, uint32_t queued, struct error *err)
{
    const struct seq *before = NULL;
    uint32_t n = 0;

    for (const struct seq *seq = model->oldest; seq; before = seq, seq = seq->younger, n++)
        CLAIM(seq->state == SEQ_QUEUED && seq->older == before && n < queued &&
                  (!before || before->waiting_since <= seq->waiting_since),
              "request %llu: its age is kept wrongly", (unsigned long long)seq->request->id);
    CLAIM(n == queued && model->youngest == before, "%u queued, %u known by age", queued, n);
    return 0;
}

static int verify_requests(const struct sched_model *model, struct error *err)
{
    uint32_t waiting = 0, running = 0, queued = 0, suspects = 0, lone = 0;
    uint64_t backlog = 0;

    for (const struct request *r = model->requests; r; r = r->next) {
        uint32_t live = 0;
        CLAIM(r->next ? r->next->prev == r : model->oldest_request == r,
              "request %llu: linked wrongly", (unsigned long long)r->id);
        for (uint32_t i = 0; i < r->n; i++) {
            enum seq_state state = r->seqs[i].state;
            live += state != SEQ_ENDED;
            waiting += state == SEQ_BLOCKED || state == SEQ_QUEUED;
            running += seq_runs(&r->seqs[i]);
            queued += state == SEQ_QUEUED;
            suspects += r->seqs[i].suspect != 0;
            lone += r->seqs[i].lone;
            CLAIM(r->seqs[i].suspect || !r->seqs[i].lone, "request %llu: alone without reason",
                  (unsigned long long)r->id);
            backlog += state == SEQ_QUEUED ? r->seqs[i].n_known : 0;
            CLAIM(state != SEQ_BLOCKED || r->seqs[0].state != SEQ_ENDED,
                  "request %llu: waits for nobody", (unsigned long long)r->id);
            CLAIM(seq_runs(&r->seqs[i]) || !r->seqs[i].n_pages, "request %llu: holds pages",
                  (unsigned long long)r->id);
        }
        CLAIM(live == r->n_live && live, "request %llu: %u live", (unsigned long long)r->id, live);
    }
    CLAIM(waiting == model->n_waiting && running == model->n_running && backlog == model->backlog,
          "%u wait, %u run, counted %u and %u", model->n_waiting, model->n_running, waiting,
          running);
    CLAIM(suspects == model->n_suspects && lone == model->n_lone,
          "%u suspects, %u alone, counted %u and %u", model->n_suspects, model->n_lone, suspects,
          lone);
    return verify_ages(model, queued, err);
}

int sched_verify(const struct sched *sched, struct error *err)
{
    for (const struct sched_model *m = sched->models; m; m = m->next) {
        int rc = verify_requests(m, err);
        if (!rc)
            rc = verify_clients(m, err);
        for (uint32_t i = 0; i < m->n_instances && !rc; i++)
            rc = verify_instance(m->instances[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}
