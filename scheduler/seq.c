/* SPDX-License-Identifier: Apache-2.0 */
/* The life of a sequence; see the table in sched_private.h. */
#include "scheduler/sched_private.h"

#include <errno.h>
#include <string.h>

const char *seq_state_text(enum seq_state state)
{
    static const char *const texts[] = {
#define X(name, text, next) text,
        SEQ_STATES(X)
#undef X
    };
    return texts[state];
}

static void turn(struct seq *seq, enum seq_state to)
{
    static const unsigned allowed[] = {
#define X(name, text, next) next,
        SEQ_STATES(X)
#undef X
    };
    assert(allowed[seq->state] & 1u << to);
    seq->state = to;
}

void seq_decodes(struct seq *seq)
{
    turn(seq, SEQ_DECODE);
}

/* Room for n elements in a growing array; false without memory. */
static bool grow(void **array, uint32_t *cap, uint32_t n, size_t size)
{
    uint32_t more = MAX(MAX(n, 8), *cap + *cap / 2);

    if (n <= *cap)
        return true;
    void *moved = reallocarray(*array, more, size);
    if (!moved)
        return false;
    *array = moved;
    *cap = more;
    return true;
}

bool seq_append(struct seq *seq, uint32_t token)
{
    if (!grow((void **)&seq->tokens, &seq->cap_tokens, seq->n_known + 1, sizeof *seq->tokens))
        return false;
    seq->tokens[seq->n_known++] = token;
    return true;
}

/* ---- blocks ---- */

bool seq_hash(struct seq *seq)
{
    uint32_t size = seq->request->model->config.page_size, blocks = seq->n_known / size;

    if (!grow((void **)&seq->hashes, &seq->cap_hashes, blocks, sizeof *seq->hashes))
        return false;
    for (; seq->n_hashes < blocks; seq->n_hashes++) {
        uint32_t b = seq->n_hashes;
        const struct digest *parent = b ? &seq->hashes[b - 1] : &seq->request->root;
        seq->hashes[b] = kvhash_next(parent, seq->tokens + (size_t)b * size, size);
    }
    return true;
}

uint32_t seq_shareable(const struct seq *seq)
{
    uint32_t size = seq->request->model->config.page_size;
    uint32_t blocks = MIN((seq->n_known - 1) / size, seq->n_hashes);

    if (seq->request->prompt_logprobs && !seq->choice)
        blocks = MIN(blocks, seq->request->prompt_reported / size);
    return blocks;
}

void seq_register(struct seq *seq)
{
    uint32_t size = seq->request->model->config.page_size;
    uint32_t blocks = MIN(seq->done, seq->n_known) / size;

    if (seq->unregistered || seq->n_registered >= blocks || !seq_hash(seq))
        return;
    for (; seq->n_registered < blocks && !seq->unregistered; seq->n_registered++) {
        uint32_t b = seq->n_registered;
        seq->unregistered = !kvpages_register(seq->instance->pages, seq->pages[b], &seq->hashes[b],
                                              seq->tokens + (size_t)b * size);
    }
}

bool seq_reserve(struct seq *seq, uint32_t n_tokens)
{
    uint32_t need = pages_for(seq->request->model, n_tokens);

    if (!grow((void **)&seq->pages, &seq->cap_pages, need, sizeof *seq->pages))
        return false;
    while (seq->n_pages < need) {
        uint32_t page = kvpages_take(seq->instance->pages);
        if (page == KVPAGE_NONE)
            return false;
        seq->pages[seq->n_pages++] = page;
    }
    return true;
}

/* ---- the queue by age ---- */

static void age_insert(struct seq *seq)
{
    struct sched_model *model = seq->request->model;
    struct seq *older = model->youngest;

    while (older && older->waiting_since > seq->waiting_since) /* only if time went back */
        older = older->older;
    seq->older = older;
    seq->younger = older ? older->younger : model->oldest;
    *(seq->older ? &seq->older->younger : &model->oldest) = seq;
    *(seq->younger ? &seq->younger->older : &model->youngest) = seq;
}

static void age_remove(struct seq *seq)
{
    struct sched_model *model = seq->request->model;

    *(seq->older ? &seq->older->younger : &model->oldest) = seq->younger;
    *(seq->younger ? &seq->younger->older : &model->youngest) = seq->older;
    seq->older = seq->younger = NULL;
}

/* ---- on and off an instance ---- */

static void release_pages(struct seq *seq)
{
    while (seq->n_pages)
        kvpages_unref(seq->instance->pages, seq->pages[--seq->n_pages]);
}

bool seq_admit(struct seq *seq, struct sched_instance *instance, const uint32_t *hits,
               uint32_t n_hits)
{
    struct sched_model *model = instance->model;

    if (instance->n_running == instance->limits.max_seqs ||
        !grow((void **)&seq->pages, &seq->cap_pages, n_hits, sizeof *seq->pages))
        return false;
    struct sched_instance *meant_for = seq->instance;
    seq->instance = instance; /* while its pages are taken */
    for (uint32_t i = 0; i < n_hits; i++) {
        kvpages_ref(instance->pages, hits[i]);
        seq->pages[seq->n_pages++] = hits[i];
    }
    if (!seq_reserve(seq, seq->n_known)) {
        release_pages(seq);
        seq->instance = meant_for;
        return false;
    }
    seq->instance = meant_for;
    queue_pull(seq);
    age_remove(seq);
    model->n_waiting--;
    model->backlog -= seq->n_known;
    turn(seq, SEQ_PREFILL);
    seq->instance = instance;
    seq->slot = instance->n_running;
    instance->running[instance->n_running++] = seq;
    model->n_running++;
    seq->request->client->running++;
    seq->id = ++model->sched->next_seq;
    seq->planned = seq->done = n_hits * model->config.page_size;
    seq->n_registered = n_hits;
    seq->first = true;
    instance->work += seq->n_known - seq->planned;
    if (!seq->begun)
        seq->n_cached = seq->planned;
    seq->begun = true;
    return true;
}

static void leave(struct seq *seq, uint64_t now)
{
    struct sched_instance *instance = seq->instance;
    struct seq *last = instance->running[--instance->n_running];

    instance->running[seq->slot] = last;
    last->slot = seq->slot;
    if (seq->state == SEQ_PREFILL)
        instance->work -= seq->n_known - seq->planned;
    release_pages(seq);
    seq->request->model->n_running--;
    seq->request->client->running--;
    seq->request->model->counters.wasted_tokens += seq->pending;
    seq->planned = seq->done = seq->pending = seq->n_registered = 0;
    seq->id = 0;
    seq->instance = NULL;
    if (!instance->n_running)
        instance->idle_since = now;
    instance_ready(instance);
}

static void queue(struct seq *seq, uint64_t now)
{
    struct sched_model *model = seq->request->model;

    turn(seq, SEQ_QUEUED);
    seq->waiting_since = now;
    seq->passed_over = 0;
    model->backlog += seq->n_known;
    age_insert(seq);
    seq_hash(seq); /* without memory for it: fewer hits */
    route(seq);
}

void seq_requeue(struct seq *seq, uint64_t now)
{
    leave(seq, now);
    seq->request->model->n_waiting++;
    queue(seq, now);
}

void seq_unblock(struct seq *seq, uint64_t now)
{
    queue(seq, now);
}

void request_unblock(struct request *request, uint64_t now)
{
    for (uint32_t i = 1; i < request->n; i++)
        if (request->seqs[i].state == SEQ_BLOCKED)
            seq_unblock(&request->seqs[i], now);
}

/* ---- the end ---- */

/* What a sequence may be expected to generate, for estimates of the backlog. */
static void learn_output(struct sched_model *model, const struct seq *seq)
{
    model->mean_output += (seq_generated(seq) - model->mean_output) / 32;
}

void seq_end(struct seq *seq, enum sched_reason reason, const char *text, uint64_t now)
{
    struct request *request = seq->request;
    struct sched_model *model = request->model;

    if (seq_runs(seq)) {
        leave(seq, now);
    } else {
        if (seq->state == SEQ_QUEUED) {
            queue_pull(seq);
            age_remove(seq);
            model->backlog -= seq->n_known;
        }
        model->n_waiting--;
    }
    turn(seq, SEQ_ENDED);
    suspect_clear(seq);
    if (reason == SCHED_STOP || reason == SCHED_LENGTH)
        learn_output(model, seq);
    request->holds++;
    if (!seq->choice)
        request_unblock(request, now);
    sched_emit(model->sched, &(struct sched_event){.kind = SCHED_FINISHED,
                                                   .request = request->id,
                                                   .user = request->user,
                                                   .choice = seq->choice,
                                                   .reason = reason,
                                                   .text = text,
                                                   .n_prompt = request->n_prompt,
                                                   .n_cached = seq->n_cached,
                                                   .n_generated = seq_generated(seq),
                                                   .preempted = seq->preempted,
                                                   .replayed = seq->replayed});
    client_leave(model, request->client);
    if (!--request->n_live)
        request_forget(request);
    request_drop(request);
}
