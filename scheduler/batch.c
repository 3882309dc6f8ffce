/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Planning one step, in this order:
 *   0. a suspect that is to be run alone comes first, when nobody else is in flight any more;
 *   1. every decoding sequence gets the page for its next token; when pages run out, the least
 * urgent and youngest running sequence is taken off, its tokens to be computed again later;
 *   2. whoever is next in the queue and finds no room may displace a running sequence (fair.c);
 *   3. every decoding sequence runs one token;
 *   4. the rest of the budget goes to prompts in chunks, in the order of fair.c, be they begun or
 * waiting. There are never more running sequences than tokens in the budget, so 3 always fits.
 *
 * When two steps are in flight, one that joins the second is planned in the same way, from 4 on,
 * for those who have not begun.
 */
#include "scheduler/sched_private.h"

struct build {
    struct sched_instance *instance;
    struct flight *flight;
    uint32_t budget;        /* tokens left, */
    uint32_t kept;          /* so many of them for those whose client has nothing else running */
    uint32_t most;          /* sequences */
    struct company company; /* in flight or in this step */
    uint64_t now;
};

static uint32_t budget_of(const struct sched_instance *instance)
{
    uint32_t own = instance->model->config.step_tokens;
    return own ? MIN(own, instance->limits.max_tokens) : instance->limits.max_tokens;
}

/* All tokens the sequence may ever have here. */
static uint64_t seq_limit(const struct seq *seq)
{
    return MIN((uint64_t)seq->request->n_prompt + seq->request->max_tokens,
               seq->instance->limits.max_positions);
}

static bool may_decode(const struct build *b, const struct seq *seq)
{
    return seq->state == SEQ_DECODE && (!seq->pending || b->instance->limits.token_refs) &&
           seq->n_known + seq->pending < seq_limit(seq) && company_takes(&b->company, seq);
}

static void add(struct build *b, struct seq *seq, uint32_t n_tokens, bool sample)
{
    static const uint32_t unknown;
    struct request *request = seq->request;
    struct sched_model *model = b->instance->model;
    struct flight *flight = b->flight;
    bool from_previous = seq->planned >= seq->n_known;
    uint32_t index = seq_generated(seq) + seq->pending;

    flight->seqs[flight->n] = (struct sched_seq){
        .id = seq->id,
        .request = request->id,
        .choice = seq->choice,
        .user = request->user,
        .sampling = request->sampling,
        .tokens = from_previous ? &unknown : seq->tokens + seq->planned,
        .n_tokens = n_tokens,
        .position = seq->planned,
        .prompt_len = request->n_prompt,
        .pages = seq->pages,
        .n_pages = seq->n_pages,
        .sample_index = index,
        .sample = sample,
        .token_from_previous = from_previous,
        .suppress_stop = sample && index < request->min_tokens,
        .prompt_logprobs =
            request->prompt_logprobs && !seq->choice && seq->planned < request->n_prompt,
        .first = seq->first,
        .known = seq->tokens,
        .n_known = seq->n_known,
    };
    flight->entries[flight->n++] = seq;
    flight->n_tokens += n_tokens;
    flight->n_samples += sample;
    flight->n_prompt += seq->state == SEQ_PREFILL ? n_tokens : 0;
    request->holds++;
    seq->first = false;
    seq->in_step = flight->id;
    seq->planned += n_tokens;
    seq->pending += sample;
    b->budget -= n_tokens;
    if (model->n_suspects)
        company_add(&b->company, seq);
    bool output = seq->state == SEQ_DECODE;
    client_charge(model, request->client, output ? model->config.output_weight : n_tokens);
    if (!output)
        model->counters.prompt_tokens += n_tokens;
}

static void preempt(struct seq *seq, uint64_t now)
{
    seq->preempted++;
    seq->request->model->counters.preemptions++;
    seq_requeue(seq, now);
}

/* ---- 1: pages ---- */

static struct seq *page_victim(const struct sched_instance *instance)
{
    struct seq *worst = instance->running[0];

    for (uint32_t i = 1; i < instance->n_running; i++) {
        struct seq *r = instance->running[i];
        if (r->request->priority != worst->request->priority
                ? r->request->priority > worst->request->priority
            : r->request->id != worst->request->id ? r->request->id > worst->request->id
                                                   : r->choice > worst->choice)
            worst = r;
    }
    return worst;
}

/* A page for the next token, somebody else's if need be. False: the running list has changed. */
static bool reserve_next(struct build *b, struct seq *seq, bool *preempted)
{
    bool changed = false;

    while (!seq_reserve(seq, seq->planned + 1)) {
        struct seq *victim = page_victim(b->instance);
        bool alone = b->instance->n_running == 1;
        if (alone && seq->pending)
            break; /* its last token is on the way */
        changed = *preempted = true;
        if (alone) {
            seq_end(seq, SCHED_LENGTH, "all KV pages of the instance are taken", b->now);
            break;
        }
        preempt(victim, b->now);
        if (victim == seq)
            break;
    }
    return !changed;
}

/* True when somebody had to go. */
static bool reserve_pages(struct build *b)
{
    struct sched_instance *instance = b->instance;
    bool preempted = false;

    for (uint32_t i = 0; i < instance->n_running;) {
        struct seq *seq = instance->running[i];
        if (may_decode(b, seq) && !reserve_next(b, seq, &preempted))
            i = 0;
        else
            i++;
    }
    return preempted;
}

/* ---- admission ---- */

/* Finds the cached pages of the sequence; true when it can be admitted. */
static bool has_place(struct build *b, const struct seq *seq, uint32_t *ret_hits)
{
    struct sched_instance *instance = b->instance;
    struct kvpages *pages = instance->pages;
    uint32_t size = instance->model->config.page_size, blocks = seq_shareable(seq), n = 0;
    uint64_t need = pages_for(instance->model, seq->n_known);

    for (; n < blocks; n++) {
        uint32_t page = kvpages_find(pages, &seq->hashes[n], seq->tokens + (size_t)n * size);
        if (page == KVPAGE_NONE)
            break;
        instance->hits[n] = page;
        need -= kvpages_refs(pages, page) != 0;
    }
    *ret_hits = n;
    if (instance->n_running)
        need += instance->n_running; /* those who run will want a page each before long */
    return instance->n_running < route_seats(instance, seq) && need <= kvpages_available(pages);
}

static void pass_over(struct seq *seq)
{
    for (int i = 0; i < 8 && (seq = seq->prev); i++)
        seq->passed_over++;
}

/* Notes that it will register more blocks of its known tokens. */
static void instance_computes(struct sched_instance *instance, struct seq *seq)
{
    uint32_t blocks = seq->n_known / instance->model->config.page_size;

    if (seq->n_registered < blocks && !seq->unregistered &&
        instance->n_computing < instance->limits.max_seqs)
        instance->computing[instance->n_computing++] = seq;
}

/* Runs from now on. */
static bool admit(struct build *b, struct seq *seq, uint32_t n_hits)
{
    struct sched_model *model = b->instance->model;
    bool fresh = !seq->begun;

    if (!seq->instance)
        pass_over(seq);
    if (!seq_admit(seq, b->instance, b->instance->hits, n_hits))
        return false;
    instance_computes(b->instance, seq);
    if (fresh) {
        model->counters.cached_tokens += seq->planned;
        model->counters.queried_tokens += seq->n_known;
    }
    return true;
}

/* Admits the next in the queue; false when there is no place for it. */
static bool admit_next(struct build *b, struct seq *seq)
{
    uint32_t hits;

    if (has_place(b, seq, &hits))
        return admit(b, seq, hits);
    if (seq->instance && b->instance->model->n_instances > 1)
        route_return(b->instance); /* others may have place sooner */
    return false;
}

/* 2: makes place for the next in the queue, if that is just. */
static void displace(struct build *b)
{
    struct seq *seq = queue_next(b->instance, &b->company), *victim;
    uint32_t hits;
    bool place = !seq || has_place(b, seq, &hits);

    if (place)
        return;
    while (!place && (victim = fair_victim(b->instance, seq))) {
        preempt(victim, b->now);
        place = has_place(b, seq, &hits);
    }
    if (place)
        admit(b, seq, hits); /* at once: the victim might be before it in the queue */
}

/* ---- 3 and 4 ---- */

static void add_decodes(struct build *b)
{
    for (uint32_t i = 0; i < b->instance->n_running; i++) {
        struct seq *seq = b->instance->running[i];
        if (may_decode(b, seq) && seq->n_pages >= pages_for(b->instance->model, seq->planned + 1))
            add(b, seq, 1, true);
    }
}

static struct seq *next_begun(const struct build *b)
{
    struct seq *best = NULL;

    for (uint32_t i = 0; i < b->instance->n_running; i++) {
        struct seq *seq = b->instance->running[i];
        if (seq->state == SEQ_PREFILL && seq->planned < seq->n_known &&
            seq->in_step != b->flight->id && company_takes(&b->company, seq) &&
            (!best || seq_before(seq, best)))
            best = seq;
    }
    return best;
}

static uint32_t room_for(const struct build *b, const struct seq *seq)
{
    uint32_t kept = seq->request->client->running > seq_runs(seq) ? b->kept : 0;

    return b->budget > kept ? b->budget - kept : 0;
}

static void add_chunk(struct build *b, struct seq *seq)
{
    uint32_t left = seq->n_known - seq->planned, n = MIN(left, room_for(b, seq));
    bool sample = n == left && seq->request->max_tokens;

    b->instance->work -= n;
    add(b, seq, n, sample);
    if (sample)
        seq_decodes(seq);
}

static void add_prompts(struct build *b, bool admitting)
{
    while (b->budget && b->flight->n < b->most) {
        struct seq *seq = b->flight->joins ? NULL : next_begun(b);
        struct seq *waiting = admitting ? queue_next(b->instance, &b->company) : NULL;
        if (waiting && (!seq || seq_before(waiting, seq))) {
            if (!room_for(b, waiting))
                return;
            admitting = admit_next(b, waiting); /* no overtaking of one that finds no place */
            seq = admitting ? waiting : seq;
        }
        if (!seq)
            return;
        add_chunk(b, seq);
    }
}

/* ---- 0: suspects that run alone ---- */

static struct seq *next_lone(const struct sched_instance *instance)
{
    for (uint32_t i = 0; i < instance->n_running; i++)
        if (instance->running[i]->lone)
            return instance->running[i];
    return instance->draining ? NULL : queue_next_lone(instance);
}

/*
 * It is being replayed, so its tokens are a prompt. Who has no place makes some. Others wait until
 * it brings a token, however it is cut; but a step as long as the instance takes might count as a
 * stall, and whoever is alone at a stall is guilty.
 */
static void add_lone(struct build *b, struct seq *seq)
{
    uint32_t hits;

    b->budget = MIN(b->budget, pace_prompts(b->instance->model, 0, false));

    if (!seq_runs(seq)) {
        while (!has_place(b, seq, &hits) && b->instance->n_running)
            preempt(page_victim(b->instance), b->now);
        if (!has_place(b, seq, &hits) || !admit(b, seq, hits))
            return;
    }
    if (seq->state == SEQ_PREFILL && seq->planned < seq->n_known)
        add_chunk(b, seq);
}

/* True when nothing may be planned before those in flight have come back. */
static bool plan_lone(struct build *b)
{
    struct seq *seq =
        b->instance->model->n_lone && !b->company.lone ? next_lone(b->instance) : NULL;

    if (seq && b->instance->n_flights)
        return true;
    if (seq)
        add_lone(b, seq);
    return false;
}

static void note_computing(struct sched_instance *instance)
{
    instance->n_computing = 0;
    for (uint32_t i = 0; i < instance->n_running; i++)
        instance_computes(instance, instance->running[i]);
}

static void plan_all(struct build *b)
{
    struct sched_instance *instance = b->instance;
    bool admitting = !reserve_pages(b) && !instance->draining;
    uint32_t most = instance->model->config.prefill_tokens;

    note_computing(instance);
    if (admitting)
        displace(b);
    add_decodes(b);
    if (b->flight->n && most)
        b->budget = MIN(b->budget, most);
    b->budget = MIN(b->budget, pace_prompts(instance->model, b->flight->n_tokens, false));
    add_prompts(b, admitting);
}

/* ---- joining ---- */

/*
 * Leaves in the budget what the second step in flight, and those that join it already, have left,
 * and beyond its pace a little for newcomers: prompts of others may have taken all of that.
 * False: nothing may join. That is so as well when one of its sequences was taken off since: the
 * pages that it writes may be another's by now.
 */
static bool leave_rest(struct build *b)
{
    const struct sched_instance *instance = b->instance;
    uint32_t prefill = instance->model->config.prefill_tokens, seqs = 0, tokens = 0, prompt = 0;
    const struct flight *flight = &instance->flights[instance->n_flights];

    do {
        flight--;
        for (uint32_t i = 0; i < flight->n; i++)
            if (flight->entries[i]->id != flight->seqs[i].id)
                return false;
        seqs += flight->n;
        tokens += flight->n_tokens;
        prompt += flight->n_prompt;
    } while (flight->joins);
    if (seqs >= instance->limits.max_seqs || tokens >= b->budget)
        return false;
    b->budget -= tokens;
    if (prefill)
        b->budget = MIN(b->budget, prefill > prompt ? prefill - prompt : 0);
    uint32_t pace = pace_prompts(instance->model, tokens - prompt, false);
    uint32_t all = pace_prompts(instance->model, tokens - prompt, true);
    b->budget = MIN(b->budget, all > prompt ? all - prompt : 0);
    b->kept = all > prompt ? all - MAX(pace, prompt) : 0;
    b->most = MIN(b->most, instance->limits.max_seqs - seqs);
    return true;
}

static void plan_joining(struct build *b)
{
    if (!leave_rest(b))
        return;
    note_computing(b->instance);
    add_prompts(b, true);
}

/* Steps in flight that join no other. */
static uint32_t n_leading(const struct sched_instance *instance)
{
    uint32_t n = 0;

    for (uint32_t f = 0; f < instance->n_flights; f++)
        n += !instance->flights[f].joins;
    return n;
}

static bool must_wait(const struct sched_instance *instance, bool joins)
{
    if (instance->gone || (instance->n_flights && instance->refused))
        return true;
    if (joins)
        return !instance->limits.joins || instance->draining || !instance->model->n_waiting;
    if (instance->n_flights && instance->flights[0].joins)
        return true; /* it comes right behind the one that it joined */
    for (uint32_t f = 0; f < instance->n_flights && !instance->limits.token_refs; f++)
        if (instance->flights[f].n_samples)
            return true;
    return false;
}

/* A free one comes to the end of those in flight; NULL: there is none. */
static struct flight *take_flight(struct sched_instance *instance, bool joins)
{
    struct flight *end = &instance->flights[instance->n_flights];

    for (struct flight *f = end; f < instance->flights + SCHED_FLIGHTS; f++) {
        struct flight free = *f;
        if (free.joins != joins)
            continue;
        *f = *end;
        free.n = free.n_tokens = free.n_samples = free.n_prompt = 0;
        free.stalled = false;
        *end = free;
        return end;
    }
    return NULL;
}

bool sched_next_step(struct sched_instance *instance, uint64_t now, struct sched_step *ret_step)
{
    bool joins = n_leading(instance) == SCHED_DEPTH;
    struct flight *flight = must_wait(instance, joins) ? NULL : take_flight(instance, joins);

    if (!flight)
        return false;
    flight->id = ++instance->model->sched->next_step;
    flight->planned_at = now;
    struct build b = {.instance = instance,
                      .flight = flight,
                      .budget = budget_of(instance),
                      .most = flight->cap,
                      .company = company_of(instance),
                      .now = now};
    instance->n_computing = 0;
    if (joins)
        plan_joining(&b);
    else if (plan_lone(&b))
        return false;
    else if (!flight->n)
        plan_all(&b);
    instance->n_computing = 0;
    if (!flight->n)
        return false;
    instance->n_flights++;
    instance->model->counters.steps++;
    *ret_step = (struct sched_step){flight->id,       flight->seqs,      flight->n,
                                    flight->n_tokens, flight->n_samples, joins};
    return true;
}
