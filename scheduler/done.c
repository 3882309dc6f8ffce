/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results. An entry of the step is void when its sequence has ended or was taken off since (its id
 * is another then): what was computed for it is dropped, and computed again if it is still wanted.
 */
#include "scheduler/sched_private.h"

#include <errno.h>
#include <string.h>

/* Older steps weigh less in the measured speed. */
#define SPEED_DECAY 0.98

/* Does the step show what the instance can do, rather than how little there was to do? */
static bool is_full(const struct sched_instance *instance, const struct flight *flight)
{
    return 2 * (uint64_t)flight->n >= instance->limits.max_seqs ||
           2 * (uint64_t)flight->n_tokens >= instance->limits.max_tokens;
}

static void measure(struct sched_instance *instance, const struct flight *flight, bool refused,
                    uint64_t now)
{
    struct sched_model *model = instance->model;
    uint32_t tokens = instance->n_measured + flight->n_tokens;
    uint32_t prompts = instance->n_measured_prompt + flight->n_prompt;

    if (!instance->n_measured)
        instance->measured = MAX(flight->planned_at, instance->last_done);
    instance->last_done = now;
    bool more = instance->n_flights && instance->flights[0].joins; /* ran with it, comes at once */
    instance->n_measured = more ? tokens : 0;
    instance->n_measured_prompt = more ? prompts : 0;
    if (more || refused)
        return; /* a refusal is quick, whatever was refused */
    double ns = (double)(now > instance->measured ? now - instance->measured : 1);
    if (prompts)
        pace_learn(model, tokens, ns);
    if (!is_full(instance, flight) && tokens * model->speed_ns < model->speed_tokens * ns)
        return; /* nothing is learned from a slow step with little in it */
    model->speed_tokens = model->speed_tokens * SPEED_DECAY + tokens;
    model->speed_ns = model->speed_ns * SPEED_DECAY + ns;
}

static void report_prompt(struct seq *seq, const struct sched_seq *part, const void *logprobs)
{
    struct request *request = seq->request;
    uint32_t first = request->prompt_reported;
    uint32_t end = MIN(part->position + part->n_tokens, request->n_prompt);

    if (seq->choice || end <= first)
        return;
    request->prompt_reported = end;
    sched_emit(request->model->sched,
               &(struct sched_event){.kind = SCHED_PROMPT,
                                     .request = request->id,
                                     .user = request->user,
                                     .first = first,
                                     .count = end - first,
                                     .prompt_logprobs = logprobs,
                                     .row = first > part->position ? first - part->position : 0});
}

static bool is_stop(const struct request *request, uint32_t token)
{
    const struct sched_model_config *config = &request->model->config;

    for (uint32_t i = 0; i < request->n_stop_ids; i++)
        if (request->stop_ids[i] == token)
            return true;
    for (uint32_t i = 0; i < config->n_stop_ids && !request->ignore_eos; i++)
        if (config->stop_ids[i] == token)
            return true;
    return false;
}

static void take_token(struct seq *seq, const struct sched_seq_result *result, uint64_t now)
{
    struct request *request = seq->request;
    struct sched_model *model = request->model;
    uint64_t id = seq->id;

    seq->pending--;
    if (!seq_append(seq, result->token)) {
        seq_end(seq, SCHED_ERROR, "no memory for another token", now);
        return;
    }
    suspect_clear(seq);
    model->counters.generated_tokens++;
    sched_emit(model->sched, &(struct sched_event){.kind = SCHED_TOKEN,
                                                   .request = request->id,
                                                   .user = request->user,
                                                   .choice = seq->choice,
                                                   .now = now,
                                                   .token = result->token,
                                                   .index = seq_generated(seq) - 1,
                                                   .logprob = result->logprob,
                                                   .top = result->top,
                                                   .n_top = result->n_top});
    if (seq->id != id || seq->state == SEQ_ENDED)
        return; /* cancelled or stopped by whom the event told */
    if (result->ended ||
        (seq_generated(seq) > request->min_tokens && is_stop(request, result->token)))
        seq_end(seq, SCHED_STOP, NULL, now);
    else if (seq_generated(seq) >= request->max_tokens ||
             seq->n_known >= seq->instance->limits.max_positions)
        seq_end(seq, SCHED_LENGTH, NULL, now);
}

static void take_part(struct seq *seq, const struct sched_seq *part, const void *logprobs,
                      const struct sched_seq_result *result, uint64_t now)
{
    struct request *request = seq->request;

    seq->done += part->n_tokens;
    seq_register(seq);
    report_prompt(seq, part, logprobs);
    if (seq->id != part->id)
        return;
    if (!seq->choice && seq->done >= request->n_prompt)
        request_unblock(request, now);
    if (result) {
        take_token(seq, result, now);
    } else if (!request->max_tokens && seq->done >= request->n_prompt) {
        seq_end(seq, SCHED_LENGTH, NULL, now);
    }
}

/*
 * The step changed nothing: its sequences are taken off and tried again, by the rules of suspect.c:
 * one that is refused by itself twice in a row fails. A step that was in flight behind it may be
 * refused because of it: that counts as the same refusal.
 */
static void take_refusal(struct sched_instance *instance, struct flight *flight, const char *text,
                         uint64_t now)
{
    bool first = !instance->refused, joined = instance->n_flights && instance->flights[0].joins;

    if (first)
        instance->refused = ++instance->model->sched->next_death;
    struct seq *guilty = suspect_death(instance, flight, 1, instance->refused, first && !joined);
    for (uint32_t i = 0; i < flight->n; i++) {
        struct seq *seq = flight->entries[i];
        if (seq->id != flight->seqs[i].id)
            continue;
        seq->replayed++;
        seq_requeue(seq, now);
    }
    if (guilty)
        request_end(guilty->request, SCHED_ERROR, text, now);
}

static int check(const struct sched_instance *instance, const struct sched_result *result,
                 struct error *err)
{
    const struct flight *flight = &instance->flights[0];

    if (!instance->n_flights)
        return error_set(err, EINVAL, "a result of step %llu, but no step is in flight",
                         (unsigned long long)result->step);
    if (result->step != flight->id)
        return error_set(err, EINVAL, "a result of step %llu, expected that of %llu",
                         (unsigned long long)result->step, (unsigned long long)flight->id);
    if (!result->error && result->n_seqs != flight->n_samples)
        return error_set(err, EINVAL, "step %llu: %u sampled tokens, expected %u",
                         (unsigned long long)result->step, result->n_seqs, flight->n_samples);
    return 0;
}

int sched_step_done(struct sched_instance *instance, const struct sched_result *result,
                    uint64_t now, struct error *err)
{
    int rc = check(instance, result, err);
    if (rc < 0)
        return rc;
    struct flight flight = instance->flights[0];

    memmove(instance->flights, instance->flights + 1, (SCHED_FLIGHTS - 1) * sizeof flight);
    instance->flights[SCHED_FLIGHTS - 1] = flight; /* unused until this returns */
    instance->n_flights--;
    measure(instance, &flight, result->error, now);
    if (result->error) {
        take_refusal(instance, &flight,
                     result->error_text ? result->error_text : "the instance refused it", now);
    } else {
        for (uint32_t i = 0, sampled = 0; i < flight.n; i++) {
            const struct sched_seq *part = &flight.seqs[i];
            const struct sched_seq_result *one = part->sample ? &result->seqs[sampled++] : NULL;
            const void *logprobs = result->prompt_logprobs ? result->prompt_logprobs[i] : NULL;
            if (flight.entries[i]->id == part->id)
                take_part(flight.entries[i], part, logprobs, one, now);
        }
    }
    for (uint32_t i = 0; i < flight.n; i++)
        request_drop(flight.entries[i]->request);
    if (!instance->n_flights)
        instance->refused = 0;
    if (!instance->n_running && !instance->n_flights)
        instance->idle_since = now;
    instance_ready(instance);
    return 0;
}
