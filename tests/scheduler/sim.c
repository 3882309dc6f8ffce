/* SPDX-License-Identifier: Apache-2.0 */
#include "sim.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define VOCAB 1000
#define EOS 7

uint64_t sim_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

double sim_uniform(uint64_t *state)
{
    return (double)(sim_random(state) >> 11) * 0x1p-53;
}

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t state = a * 31 + b + 1;
    return sim_random(&state);
}

/* ---- what happens when ---- */

enum kind { ARRIVE, CANCEL, STEP_END, SPAWNED, DIE, TICK };

struct event {
    uint64_t at, order;
    enum kind kind;
    size_t what;     /* request or node */
    uint64_t serial; /* the node's, so that a dead one's events are void */
};

struct node {
    struct sched_instance *instance; /* NULL: dead */
    uint64_t serial, born;
    uint64_t *kv;                           /* [pages, page_size] */
    struct sched_step steps[SCHED_FLIGHTS]; /* copies; the first n_run run together */
    uint32_t n_steps, n_run;
    struct {
        uint64_t id;
        uint32_t token;
    } * sampled; /* by the step before */
    uint32_t n_sampled;
    bool stalled;
};

struct choice {
    uint64_t *truth;  /* [n_truth] hash of the history up to each position */
    uint32_t *tokens; /* [n_truth] */
    uint32_t n_truth, cap;
    uint32_t n_seen;
    bool ended;
    uint32_t guilt; /* deaths it caused */
};

struct job {
    const struct sim_request *from;
    struct choice *choices;
    uint64_t id, submitted, last;
    uint32_t n;
    bool done, cancelled;
    uint32_t prompt_seen;
};

struct sim {
    const struct sim_config *config;
    struct sched *sched;
    struct sched_model *model;
    struct job *jobs;
    size_t n_jobs, n_open;
    struct node *nodes;
    size_t n_nodes, cap_nodes;
    uint32_t alive, starting;
    struct event *heap;
    size_t n_heap, cap_heap;
    uint64_t now, order, random, serial, next_scale, events;
    float *ttft, *itl, *e2e;
    size_t n_ttft, n_itl, n_e2e, cap_ttft, cap_itl, cap_e2e;
    double busy_ns, alive_ns, seqs;
    uint64_t samples; /* asked for, in all steps */
    struct error broken;
    struct sim_report report;
};

#define BROKEN(sim, ...)                                                                           \
    do {                                                                                           \
        if (!(sim)->broken.code)                                                                   \
            error_set(&(sim)->broken, EBADMSG, __VA_ARGS__);                                       \
    } while (0)

static bool sooner(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void at(struct sim *sim, uint64_t when, enum kind kind, size_t what, uint64_t serial)
{
    if (sim->n_heap == sim->cap_heap) {
        sim->cap_heap = sim->cap_heap * 2 + 64;
        sim->heap = x_realloc(sim->heap, sim->cap_heap * sizeof *sim->heap);
    }
    size_t i = sim->n_heap++;
    struct event event = {when, sim->order++, kind, what, serial};
    for (; i && sooner(&event, &sim->heap[(i - 1) / 2]); i = (i - 1) / 2)
        sim->heap[i] = sim->heap[(i - 1) / 2];
    sim->heap[i] = event;
}

static struct event next_event(struct sim *sim)
{
    struct event first = sim->heap[0], last = sim->heap[--sim->n_heap];
    size_t i = 0;

    for (size_t child; (child = 2 * i + 1) < sim->n_heap; i = child) {
        if (child + 1 < sim->n_heap && sooner(&sim->heap[child + 1], &sim->heap[child]))
            child++;
        if (!sooner(&sim->heap[child], &last))
            break;
        sim->heap[i] = sim->heap[child];
    }
    sim->heap[i] = last;
    return first;
}

static void record(float **values, size_t *n, size_t *cap, double value)
{
    if (*n == *cap) {
        *cap = *cap * 2 + 256;
        *values = x_realloc(*values, *cap * sizeof **values);
    }
    (*values)[(*n)++] = (float)value;
}

/* ---- the truth: what a request would get alone ---- */

static uint32_t prompt_token(const struct sim_request *r, size_t job, uint32_t i)
{
    uint64_t source = i < r->shared ? mix(1, r->group) : mix(2, job);
    return (uint32_t)(mix(source, i) % VOCAB);
}

static uint32_t sample(const struct sim *sim, size_t job, uint32_t choice, uint32_t index,
                       uint64_t history, bool suppress)
{
    uint64_t r = mix(history, mix(job * 131 + choice, index));
    bool stop = (double)(r >> 11) * 0x1p-53 < sim->config->eos;
    uint32_t token = (uint32_t)(r % (VOCAB - 8)) + 8;

    return stop && !suppress ? EOS : token;
}

static void learn(struct choice *c, uint32_t token)
{
    if (c->n_truth == c->cap) {
        c->cap = c->cap * 2 + 64;
        c->truth = x_realloc(c->truth, c->cap * sizeof *c->truth);
        c->tokens = x_realloc(c->tokens, c->cap * sizeof *c->tokens);
    }
    c->tokens[c->n_truth] = token;
    c->truth[c->n_truth] = mix(c->n_truth ? c->truth[c->n_truth - 1] : 0, token);
    c->n_truth++;
}

/* The choice with its truth known for positions 0 .. n - 1. */
static struct choice *truth(struct sim *sim, size_t job, uint32_t choice, uint32_t n)
{
    const struct sim_request *r = sim->jobs[job].from;
    struct choice *c = &sim->jobs[job].choices[choice];

    while (c->n_truth < n) {
        uint32_t i = c->n_truth, index = i - r->n_prompt;
        if (i < r->n_prompt)
            learn(c, prompt_token(r, job, i));
        else
            learn(c, sample(sim, job, choice, index, c->truth[i - 1], index < r->min_tokens));
    }
    return c;
}

/* ---- events from the scheduler ---- */

static uint32_t positions(const struct sim *sim, const struct sim_request *r)
{
    return MIN(r->max_tokens, sim->config->limits.max_positions - r->n_prompt);
}

static void on_token(struct sim *sim, struct job *job, const struct sched_event *e)
{
    size_t index = (size_t)(job - sim->jobs);
    struct choice *c = &job->choices[e->choice];

    if (c->ended || e->index != c->n_seen)
        BROKEN(sim, "request %zu: token %u after %u", index, e->index, c->n_seen);
    c->n_seen++;
    c = truth(sim, index, e->choice, job->from->n_prompt + c->n_seen);
    if (e->token != c->tokens[job->from->n_prompt + e->index])
        BROKEN(sim, "request %zu.%u: token %u is %u, alone it would be %u", index, e->choice,
               e->index, e->token, c->tokens[job->from->n_prompt + e->index]);
    if (c->n_seen == 1)
        record(&sim->ttft, &sim->n_ttft, &sim->cap_ttft, (double)(sim->now - job->submitted) / 1e6);
    else if (job->n == 1)
        record(&sim->itl, &sim->n_itl, &sim->cap_itl, (double)(sim->now - job->last) / 1e6);
    job->last = sim->now;
    sim->report.tokens++;
}

static uint32_t guilt_of(const struct job *job)
{
    uint32_t guilt = 0;

    for (uint32_t i = 0; i < job->n; i++)
        guilt += job->choices[i].guilt;
    return guilt;
}

/* The reason that the request alone would end for. */
static void check_end(struct sim *sim, size_t index, const struct sched_event *e)
{
    struct job *job = &sim->jobs[index];
    const struct sim_request *r = job->from;
    struct choice *c = truth(sim, index, e->choice, r->n_prompt + e->n_generated);
    bool stop =
        e->n_generated > r->min_tokens && c->tokens[r->n_prompt + e->n_generated - 1] == EOS;
    uint64_t pages = (uint64_t)sim->config->limits.pages * sim->config->limits.page_size;

    if (e->n_generated != c->n_seen)
        BROKEN(sim, "request %zu: %u generated, %u seen", index, e->n_generated, c->n_seen);
    if (e->reason == SCHED_STOP && !stop)
        BROKEN(sim, "request %zu: stopped by no stop token", index);
    if (e->reason == SCHED_LENGTH && e->n_generated != positions(sim, r) &&
        r->n_prompt + e->n_generated <= pages)
        BROKEN(sim, "request %zu: %u tokens of %u", index, e->n_generated, positions(sim, r));
    if (e->reason == SCHED_CANCELLED && !job->cancelled)
        BROKEN(sim, "request %zu: nobody cancelled it", index);
    if (e->reason == SCHED_TIMEOUT && !r->deadline)
        BROKEN(sim, "request %zu: it had no deadline", index);
    if (e->reason == SCHED_TOO_LONG && r->n_prompt <= pages)
        BROKEN(sim, "request %zu: its prompt of %u tokens fits", index, r->n_prompt);
    if (e->reason == SCHED_ERROR)
        *(guilt_of(job) ? &sim->report.guilty_errors : &sim->report.innocent_errors) += 1;
    sim->report.worst_guilt = MAX(sim->report.worst_guilt, job->choices[e->choice].guilt);
    for (uint32_t i = r->min_tokens; i + 1 < e->n_generated; i++)
        if (c->tokens[r->n_prompt + i] == EOS)
            BROKEN(sim, "request %zu: went on behind its stop token", index);
    if (r->prompt_logprobs && !e->choice && e->n_generated && job->prompt_seen != r->n_prompt)
        BROKEN(sim, "request %zu: %u prompt rows of %u", index, job->prompt_seen, r->n_prompt);
}

static void on_event(void *context, const struct sched_event *e)
{
    struct sim *sim = context;

    if (e->kind == SCHED_STALLED) {
        sim->nodes[(uintptr_t)e->user].stalled = true;
        return;
    }
    struct job *job = e->user;
    size_t index = (size_t)(job - sim->jobs);
    sim->report.digest =
        mix(sim->report.digest, mix(e->kind * 64 + e->choice, mix(index, sim->now)));
    if (job->done)
        BROKEN(sim, "request %zu: an event after its end", index);
    if (e->kind == SCHED_TOKEN) {
        on_token(sim, job, e);
    } else if (e->kind == SCHED_PROMPT) {
        if (e->first != job->prompt_seen)
            BROKEN(sim, "request %zu: prompt %u after %u", index, e->first, job->prompt_seen);
        job->prompt_seen += e->count;
    } else if (e->kind == SCHED_FINISHED) {
        if (job->choices[e->choice].ended)
            BROKEN(sim, "request %zu.%u: ends twice", index, e->choice);
        job->choices[e->choice].ended = true;
        check_end(sim, index, e);
        sim->report.finished[e->reason]++;
    } else {
        for (uint32_t i = 0; i < job->n; i++)
            if (!job->choices[i].ended)
                BROKEN(sim, "request %zu: done before its choice %u", index, i);
        job->done = true;
        sim->n_open--;
        record(&sim->e2e, &sim->n_e2e, &sim->cap_e2e, (double)(sim->now - job->submitted) / 1e6);
        sim->report.seconds = (double)sim->now / 1e9;
    }
}

/* ---- instances ---- */

static void spawned(struct sim *sim)
{
    struct error err = {0};

    if (sim->n_nodes == sim->cap_nodes) {
        sim->cap_nodes = sim->cap_nodes * 2 + 16;
        sim->nodes = x_realloc(sim->nodes, sim->cap_nodes * sizeof *sim->nodes);
    }
    size_t i = sim->n_nodes++;
    struct node *node = &sim->nodes[i];
    const struct sched_limits *limits = &sim->config->limits;
    *node = (struct node){.serial = ++sim->serial, .born = sim->now};
    if (sim->config->content) {
        node->kv = x_alloc((size_t)limits->pages * limits->page_size * sizeof *node->kv);
        node->sampled = x_alloc(2 * limits->max_seqs * sizeof *node->sampled);
    }
    if (sched_instance_add(sim->model, limits, (void *)(uintptr_t)i, sim->now, &node->instance,
                           &err) < 0)
        BROKEN(sim, "%s", error_text(&err));
    sim->alive++;
    sim->report.spawns++;
    sim->report.peak_instances = MAX(sim->report.peak_instances, sim->alive);
    if (sim->config->death_rate > 0)
        at(sim,
           sim->now +
               (uint64_t)(-log(1 - sim_uniform(&sim->random)) / sim->config->death_rate * 1e9),
           DIE, i, node->serial);
}

static void drop_step(struct sched_step *step)
{
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        free((void *)step->seqs[i].tokens);
        free((void *)step->seqs[i].pages);
    }
    free((void *)step->seqs);
    *step = (struct sched_step){0};
}

static void node_end(struct sim *sim, size_t i, bool died)
{
    struct node *node = &sim->nodes[i];
    struct sched_instance *instance = TAKE(node->instance);

    sim->alive_ns += (double)(sim->now - node->born);
    sim->alive--;
    for (uint32_t s = 0; s < node->n_steps; s++)
        drop_step(&node->steps[s]);
    node->n_steps = node->n_run = 0;
    node->serial = 0;
    free(TAKE(node->kv));
    free(TAKE(node->sampled));
    sim->report.deaths += died;
    sched_instance_gone(instance, died, sim->now);
    if (died && !sim->config->scale) {
        at(sim, sim->now + sim->config->spawn_ns, SPAWNED, 0, 0);
        sim->starting++;
    }
}

static void start(struct sim *sim, size_t i)
{
    const struct sim_config *c = sim->config;
    struct node *node = &sim->nodes[i];
    double cost = c->step_ns;

    for (node->n_run = 0; node->n_run < node->n_steps; node->n_run++) {
        const struct sched_step *step = &node->steps[node->n_run];
        if (node->n_run && !step->joins)
            break;
        cost += c->token_ns * step->n_tokens + c->seq_ns * step->n_seqs;
    }
    uint64_t ns = (uint64_t)cost;
    sim->busy_ns += (double)ns;
    if (sim_uniform(&sim->random) < sim->config->stall_rate)
        return; /* never comes back: the watchdog's matter */
    at(sim, sim->now + ns, STEP_END, i, node->serial);
}

static void check_step(struct sim *sim, const struct sched_step *step)
{
    const struct sched_limits *limits = &sim->config->limits;
    uint32_t budget = sim->config->model.step_tokens, tokens = 0;

    budget = budget ? MIN(budget, limits->max_tokens) : limits->max_tokens;
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct sched_seq *seq = &step->seqs[i];
        const struct job *job = seq->user;
        tokens += seq->n_tokens;
        if (job->done || job->choices[seq->choice].ended)
            BROKEN(sim, "a step runs request %llu, which has ended",
                   (unsigned long long)seq->request);
        if ((uint64_t)seq->n_pages * limits->page_size < seq->position + seq->n_tokens ||
            seq->position + seq->n_tokens > limits->max_positions || !seq->n_tokens)
            BROKEN(sim, "request %llu: %u tokens at %u on %u pages",
                   (unsigned long long)seq->request, seq->n_tokens, seq->position, seq->n_pages);
        for (uint32_t p = 0; p < seq->n_pages; p++)
            if (seq->pages[p] >= limits->pages)
                BROKEN(sim, "page %u of %u", seq->pages[p], limits->pages);
    }
    if (tokens != step->n_tokens || tokens > budget || step->n_seqs > limits->max_seqs)
        BROKEN(sim, "a step of %u tokens (%u said) and %u sequences", tokens, step->n_tokens,
               step->n_seqs);
}

static void send_step(struct sim *sim, size_t i, const struct sched_step *step)
{
    struct node *node = &sim->nodes[i];
    struct sched_seq *seqs = x_alloc(step->n_seqs * sizeof *seqs);

    check_step(sim, step);
    memcpy(seqs, step->seqs, step->n_seqs * sizeof *seqs);
    for (uint32_t s = 0; s < step->n_seqs && sim->config->content; s++) {
        uint32_t *tokens = x_alloc(seqs[s].n_tokens * sizeof *tokens);
        uint32_t *pages = x_alloc(seqs[s].n_pages * sizeof *pages);
        memcpy(tokens, seqs[s].tokens, seqs[s].n_tokens * sizeof *tokens);
        memcpy(pages, seqs[s].pages, seqs[s].n_pages * sizeof *pages);
        seqs[s].tokens = tokens;
        seqs[s].pages = pages;
    }
    for (uint32_t s = 0; s < step->n_seqs && !sim->config->content; s++)
        seqs[s].tokens = seqs[s].pages = NULL;
    if (node->n_steps == SCHED_FLIGHTS || (step->joins && !node->n_steps)) {
        BROKEN(sim, "a step that joins none, or too many");
        free(seqs);
        return;
    }
    node->steps[node->n_steps] = *step;
    node->steps[node->n_steps++].seqs = seqs;
    sim->report.joined += step->joins;
    sim->samples += step->n_samples;
    sim->report.steps++;
    sim->seqs += step->n_seqs;
    if (node->n_steps == 1)
        start(sim, i);
}

/* Index into node->sampled, or n_sampled. */
static uint32_t sampled_before(const struct node *node, uint64_t id)
{
    uint32_t i = 0;
    while (i < node->n_sampled && node->sampled[i].id != id)
        i++;
    return i;
}

/* An instance refuses a step that refers to tokens which the step before did not sample. */
static bool must_refuse(const struct node *node)
{
    for (uint32_t s = 0; s < node->n_run; s++) {
        const struct sched_step *step = &node->steps[s];
        for (uint32_t i = 0; i < step->n_seqs && node->kv; i++)
            if (step->seqs[i].token_from_previous &&
                sampled_before(node, step->seqs[i].id) == node->n_sampled)
                return true;
    }
    return false;
}

/* Runs a sequence's part over the node's KV memory; the history behind its last token. */
static uint64_t run_part(struct sim *sim, struct node *node, const struct sched_seq *seq)
{
    size_t index = (size_t)((struct job *)seq->user - sim->jobs);
    uint32_t size = sim->config->limits.page_size, end = seq->position + seq->n_tokens;
    const struct choice *c = truth(sim, index, seq->choice, end);
#define SLOT(p) node->kv[(size_t)seq->pages[(p) / size] * size + (p) % size]

    for (uint32_t p = seq->position; p < end; p++) {
        uint32_t token = seq->token_from_previous
                             ? node->sampled[sampled_before(node, seq->id)].token
                             : seq->tokens[p - seq->position];
        SLOT(p) = mix(p ? SLOT(p - 1) : 0, token);
    }
    /* behind a refused step there is rubbish, whose tokens nobody must see (on_token) */
    for (uint32_t p = 0; p < end && sim->config->refuse_rate <= 0; p++)
        if (SLOT(p) != c->truth[p]) {
            BROKEN(sim, "request %zu.%u: position %u is not its own (step at %u+%u)", index,
                   seq->choice, p, seq->position, seq->n_tokens);
            break;
        }
    return SLOT(end - 1);
}

/* All parts of the steps that run together, in any order: each writes what the others leave alone.
 */
static uint64_t *run_parts(struct sim *sim, struct node *node)
{
    uint32_t n = 0, at = 0;
    bool backwards = sim_random(&sim->random) & 1;

    for (uint32_t s = 0; s < node->n_run; s++)
        n += node->steps[s].n_seqs;
    uint64_t *histories = x_alloc(n * sizeof *histories);
    for (uint32_t k = 0; k < node->n_run; k++) {
        uint32_t s = backwards ? node->n_run - 1 - k : k;
        at = 0;
        for (uint32_t before = 0; before < s; before++)
            at += node->steps[before].n_seqs;
        for (uint32_t i = 0; i < node->steps[s].n_seqs; i++) {
            const struct sched_seq *seq = &node->steps[s].seqs[i];
            size_t index = (size_t)((struct job *)seq->user - sim->jobs);
            uint32_t end = seq->position + seq->n_tokens;
            if (seq->prompt_len != sim->jobs[index].from->n_prompt)
                BROKEN(sim, "request %zu: prompt of %u", index, seq->prompt_len);
            histories[at + i] = node->kv ? run_part(sim, node, seq)
                                         : truth(sim, index, seq->choice, end)->truth[end - 1];
        }
    }
    return histories;
}

static void run_step(struct sim *sim, struct node *node, const struct sched_step *step,
                     const uint64_t *histories, struct sched_seq_result *results)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct sched_seq *seq = &step->seqs[i];
        size_t index = (size_t)((struct job *)seq->user - sim->jobs);
        if (!seq->sample)
            continue;
        uint32_t token =
            sample(sim, index, seq->choice, seq->sample_index, histories[i], seq->suppress_stop);
        results[n++] = (struct sched_seq_result){.token = token};
        if (!node->sampled)
            continue;
        node->sampled[node->n_sampled].id = seq->id;
        node->sampled[node->n_sampled++].token = token;
    }
}

static bool is_poisoned(const struct sched_step *step)
{
    for (uint32_t i = 0; i < step->n_seqs; i++) {
        const struct sched_seq *seq = &step->seqs[i];
        struct job *job = seq->user;
        uint32_t last = job->from->n_prompt - 1;
        bool samples =
            job->from->poison && seq->sample && seq->sample_index + 1 == job->from->poison;
        bool runs = job->from->poison_prompt && seq->position <= last &&
                    last < seq->position + seq->n_tokens;
        if (!samples && !runs)
            continue;
        job->choices[seq->choice].guilt++;
        return true;
    }
    return false;
}

/* The results of those that ran together: what a later one refers to was sampled by any of them,
 * and by the step before one that came too late to run with it. */
static void run_all(struct sim *sim, struct node *node, struct sched_result *results)
{
    bool refused = must_refuse(node);
    int error = refused ? EINVAL : 0;

    if (refused && sim->config->refuse_rate <= 0)
        BROKEN(sim, "a step refers to tokens that were not sampled");
    if (!refused && sim_uniform(&sim->random) < sim->config->refuse_rate)
        error = ENOMEM;
    uint64_t *histories = error ? NULL : run_parts(sim, node), *at = histories;
    if (error || !node->steps[0].joins)
        node->n_sampled = 0;
    for (uint32_t s = 0; s < node->n_run; s++) {
        const struct sched_step *step = &node->steps[s];
        struct sched_seq_result *seqs = x_alloc((step->n_samples + 1) * sizeof *seqs);
        results[s] = (struct sched_result){
            .step = step->id, .seqs = seqs, .n_seqs = step->n_samples, .error = error};
        if (error)
            continue;
        run_step(sim, node, step, at, seqs);
        at += step->n_seqs;
    }
    free(histories);
}

static void step_end(struct sim *sim, size_t i)
{
    struct node *node = &sim->nodes[i];
    struct sched_step steps[SCHED_FLIGHTS];
    struct sched_result results[SCHED_FLIGHTS];
    uint32_t n = node->n_run;
    struct error err = {0};

    for (uint32_t s = 0; s < n; s++) {
        if (is_poisoned(&node->steps[s])) {
            node_end(sim, i, true);
            return;
        }
    }
    run_all(sim, node, results);
    memcpy(steps, node->steps, n * sizeof *steps);
    node->n_steps -= n;
    memmove(node->steps, node->steps + n, node->n_steps * sizeof *steps);
    node->n_run = 0;
    if (node->n_steps)
        start(sim, i);
    for (uint32_t s = 0; s < n; s++) {
        if (sched_step_done(node->instance, &results[s], sim->now, &err) < 0)
            BROKEN(sim, "%s", error_text(&err));
        drop_step(&steps[s]);
        free((void *)results[s].seqs);
    }
}

/* ---- the loop ---- */

static void arrive(struct sim *sim, size_t index)
{
    struct job *job = &sim->jobs[index];
    const struct sim_request *r = job->from;
    uint32_t *prompt = x_alloc(r->n_prompt * sizeof *prompt);
    uint32_t retry = 0;
    struct error err = {0};

    for (uint32_t i = 0; i < r->n_prompt; i++)
        prompt[i] = prompt_token(r, index, i);
    job->submitted = sim->now;
    struct sched_request request = {.model = sim->model,
                                    .client = r->client,
                                    .priority = r->priority,
                                    .prompt = prompt,
                                    .n_prompt = r->n_prompt,
                                    .min_tokens = r->min_tokens,
                                    .max_tokens = r->max_tokens,
                                    .n = r->n,
                                    .prompt_logprobs = r->prompt_logprobs,
                                    .cache_salt = &r->salt,
                                    .cache_salt_len = r->salt ? sizeof r->salt : 0,
                                    .deadline = r->deadline,
                                    .user = job};
    int rc = sched_submit(sim->sched, &request, sim->now, &job->id, &retry, &err);
    free(prompt);
    if (!rc) {
        if (r->cancel_at)
            at(sim, r->cancel_at, CANCEL, index, 0);
        return;
    }
    bool too_long =
        (uint64_t)sim->config->limits.pages * sim->config->limits.page_size < r->n_prompt;
    if (rc == -E2BIG ? !too_long : rc != SCHED_FULL || !retry || retry > 60)
        BROKEN(sim, "request %zu: refused: %s", index, error_text(&err));
    job->done = true;
    sim->n_open--;
    sim->report.refused++;
}

static void pump(struct sim *sim)
{
    struct sched_instance *instance;
    struct sched_step step;

    while ((instance = sched_ready(sim->sched)))
        while (sched_next_step(instance, sim->now, &step))
            send_step(sim, (uintptr_t)sched_instance_user(instance), &step);
}

static void scale(struct sim *sim)
{
    struct sched_scale s = sched_scale(sim->model, sim->starting, sim->now);

    for (uint64_t have = sim->alive + sim->starting; have < s.wanted; have++) {
        sim->starting++;
        at(sim, sim->now + sim->config->spawn_ns, SPAWNED, 0, 0);
    }
    if (s.release)
        node_end(sim, (uintptr_t)sched_instance_user(s.release), false);
}

static void tick(struct sim *sim)
{
    uint64_t next;

    sched_tick(sim->sched, sim->now, &next);
    for (size_t i = 0; i < sim->n_nodes; i++)
        if (sim->nodes[i].instance && sim->nodes[i].stalled)
            node_end(sim, i, true);
    if (sim->config->scale)
        scale(sim);
    if (sim->n_open)
        at(sim, sim->now + 20 * SIM_MS, TICK, 0, 0);
}

static void handle(struct sim *sim, const struct event *e)
{
    if (e->serial && sim->nodes[e->what].serial != e->serial)
        return; /* that instance has gone */
    switch (e->kind) {
    case ARRIVE:
        arrive(sim, e->what);
        break;
    case CANCEL:
        sim->jobs[e->what].cancelled = true;
        sched_cancel(sim->sched, sim->jobs[e->what].id, sim->now);
        if (!sim->jobs[e->what].done)
            BROKEN(sim, "request %zu: cancelled, not ended", e->what);
        break;
    case STEP_END:
        step_end(sim, e->what);
        break;
    case SPAWNED:
        sim->starting--;
        spawned(sim);
        break;
    case DIE:
        node_end(sim, e->what, true);
        break;
    case TICK:
        tick(sim);
        break;
    }
}

static void verify(struct sim *sim)
{
    struct error err = {0};
    struct sched_stats stats;

    if (sched_verify(sim->sched, &err) < 0)
        BROKEN(sim, "after %llu events: %s", (unsigned long long)sim->events, error_text(&err));
    sched_model_stats(sim->model, sim->now, &stats);
    if (stats.pages)
        sim->report.pages_peak =
            MAX(sim->report.pages_peak, (double)stats.pages_used / (double)stats.pages);
}

static void stuck(struct sim *sim)
{
    struct sched_stats s;

    sched_model_stats(sim->model, sim->now, &s);
    BROKEN(sim, "stuck: %u waiting, %u running, %u instances, %llu of %llu pages", s.waiting,
           s.running, s.instances, (unsigned long long)s.pages_used, (unsigned long long)s.pages);
}

static void loop(struct sim *sim)
{
    uint64_t limit = 0, moved = 0;

    while (sim->n_heap && sim->n_open && !sim->broken.code) {
        struct event e = next_event(sim);
        limit = e.at == sim->now ? limit + 1 : 0;
        if (limit > 10000000)
            BROKEN(sim, "time stands still at %llu", (unsigned long long)sim->now);
        if (e.kind != TICK)
            moved = e.at;
        if (e.at > moved + 1000 * SIM_S)
            stuck(sim);
        sim->now = e.at;
        handle(sim, &e);
        pump(sim);
        if (sim->config->verify_every && ++sim->events % sim->config->verify_every == 0)
            verify(sim);
    }
    if (sim->n_open)
        BROKEN(sim, "%zu requests never ended", sim->n_open);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(float *values, size_t n, double q)
{
    if (!n)
        return 0;
    qsort(values, n, sizeof *values, by_value);
    return values[(size_t)(q * (double)(n - 1))];
}

/* What was served: each request and step once, each sample for a client or for nobody. */
static void check_counts(struct sim *sim, const struct sched_stats *s)
{
    const struct sim_report *r = &sim->report;

    if (sim->broken.code)
        return;
    if (s->submitted != s->ended || s->submitted + r->refused != r->requests)
        BROKEN(sim, "%llu requests taken, %llu ended, %llu refused of %llu",
               (unsigned long long)s->submitted, (unsigned long long)s->ended,
               (unsigned long long)r->refused, (unsigned long long)r->requests);
    if (s->steps != r->steps || s->generated_tokens != r->tokens ||
        s->generated_tokens + s->wasted_tokens != sim->samples)
        BROKEN(sim, "%llu steps of %llu; %llu tokens served of %llu, %llu wasted of %llu samples",
               (unsigned long long)s->steps, (unsigned long long)r->steps,
               (unsigned long long)s->generated_tokens, (unsigned long long)r->tokens,
               (unsigned long long)s->wasted_tokens, (unsigned long long)sim->samples);
}

static void finish(struct sim *sim)
{
    struct sim_report *r = &sim->report;
    struct sched_stats stats;

    sched_model_stats(sim->model, sim->now, &stats);
    if (!sim->broken.code &&
        (stats.waiting || stats.running || stats.pages_used || stats.backlog_tokens))
        BROKEN(sim, "left over: %u waiting, %u running, %llu pages", stats.waiting, stats.running,
               (unsigned long long)stats.pages_used);
    check_counts(sim, &stats);
    verify(sim);
    r->stats = stats;
    for (size_t i = 0; i < sim->n_nodes; i++)
        if (sim->nodes[i].instance)
            node_end(sim, i, false);
    r->instance_seconds = sim->alive_ns / 1e9;
    r->busy = sim->alive_ns > 0 ? sim->busy_ns / sim->alive_ns : 0;
    r->batch = r->steps ? sim->seqs / (double)r->steps : 0;
    r->ttft_p50 = quantile(sim->ttft, sim->n_ttft, 0.5);
    r->ttft_p99 = quantile(sim->ttft, sim->n_ttft, 0.99);
    r->itl_p50 = quantile(sim->itl, sim->n_itl, 0.5);
    r->itl_p99 = quantile(sim->itl, sim->n_itl, 0.99);
    r->e2e_p50 = quantile(sim->e2e, sim->n_e2e, 0.5);
}

static void jobs_init(struct sim *sim, const struct sim_request *requests, size_t n)
{
    sim->jobs = x_alloc((n + 1) * sizeof *sim->jobs);
    sim->n_jobs = sim->n_open = sim->report.requests = n;
    for (size_t i = 0; i < n; i++) {
        struct job *job = &sim->jobs[i];
        job->from = &requests[i];
        job->n = MAX(requests[i].n, 1);
        job->choices = x_alloc(job->n * sizeof *job->choices);
        at(sim, requests[i].at, ARRIVE, i, 0);
    }
}

static void sim_free(struct sim *sim)
{
    sched_free(sim->sched);
    for (size_t i = 0; i < sim->n_jobs; i++) {
        for (uint32_t c = 0; c < sim->jobs[i].n; c++) {
            free(sim->jobs[i].choices[c].truth);
            free(sim->jobs[i].choices[c].tokens);
        }
        free(sim->jobs[i].choices);
    }
    free(sim->jobs);
    free(sim->nodes);
    free(sim->heap);
    free(sim->ttft);
    free(sim->itl);
    free(sim->e2e);
}

int sim_run(const struct sim_config *config, const struct sim_request *requests, size_t n,
            struct sim_report *ret, struct error *err)
{
    static const uint32_t eos = EOS;
    struct sim sim = {.config = config, .random = config->seed};
    struct sched_config sched = {.hash_seed = config->seed, .event = on_event, .context = &sim};
    struct sched_model_config model = config->model;

    model.page_size = config->limits.page_size;
    model.stop_ids = &eos;
    model.n_stop_ids = 1;
    int rc = sched_new(&sched, &sim.sched, err);
    if (!rc)
        rc = sched_model_add(sim.sched, &model, &sim.model, err);
    if (rc < 0) {
        sched_free(sim.sched);
        return rc;
    }
    jobs_init(&sim, requests, n);
    for (uint32_t i = 0; i < config->instances; i++)
        spawned(&sim);
    at(&sim, 0, TICK, 0, 0);
    loop(&sim);
    finish(&sim);
    sim_free(&sim);
    if (sim.broken.code)
        return error_set(err, -sim.broken.code, "%s", sim.broken.text);
    *ret = sim.report;
    return 0;
}
