/* SPDX-License-Identifier: Apache-2.0 */
/* What the scheduler says of a request, until its end: tokens to its choices, counts to metrics. */
#include "daemon/gateway/request.h"

#include "base/clock.h"
#include "daemon/gateway/conn.h"

static void first_token(struct choice *choice, uint64_t now)
{
    struct gw_job *job = choice->part->job;
    struct model_metrics *m = &job->model->metrics;

    choice->first_ns = now;
    if (job->any_token || !job->http)
        return;
    job->any_token = true;
    METRICS_OBSERVE(&m->ttft, ttft, (double)(now - http_received_ns(job->http)) / 1e9);
    if (choice->part->first_step_ns)
        METRICS_OBSERVE(&m->prefill, latency, (double)(now - choice->part->first_step_ns) / 1e9);
}

static void on_token(struct gw_part *part, const struct sched_event *event)
{
    struct gw_job *job = part->job;
    struct choice *choice = &job->choices[part->index * job->api.n + event->choice];
    uint64_t now = event->now;

    if (choice->first_ns)
        METRICS_OBSERVE(&job->model->metrics.itl, token, (double)(now - choice->last_ns) / 1e9);
    else
        first_token(choice, now);
    choice->last_ns = now;
    job->model->metrics.generated_tokens++;
    if (!job->http || job->fail.status)
        return;
    if (choice_token(choice, event)) {
        sched_stop(job->gw->sched, part->id, event->choice, now);
        return;
    }
    if (job->api.stream && !respond_chunk(job, choice, false))
        job_abort(job);
}

static void count_end(const struct gw_job *job, const struct choice *choice,
                      const struct sched_event *event)
{
    static const int index[] = {[SCHED_STOP] = 0,    [SCHED_LENGTH] = 1,   [SCHED_CANCELLED] = 2,
                                [SCHED_TIMEOUT] = 3, [SCHED_TOO_LONG] = 3, [SCHED_ERROR] = 3};
    struct model_metrics *m = &job->model->metrics;

    m->finished[index[event->reason]]++;
    METRICS_OBSERVE(&m->output_len, length, event->n_generated);
    choice->part->n_longest = MAX(choice->part->n_longest, event->n_generated);
    if (!choice->first_ns)
        return;
    double decode = (double)(choice->last_ns - choice->first_ns) / 1e9;
    METRICS_OBSERVE(&m->decode, latency, decode);
    if (event->n_generated > 1)
        METRICS_OBSERVE(&m->tpot, token, decode / (event->n_generated - 1));
}

static void fail_by(struct gw_job *job, const struct sched_event *event)
{
    const char *text = event->text ? event->text : sched_reason_text(event->reason);

    if (event->reason == SCHED_TOO_LONG)
        job_fail(job, 400, "context_length_exceeded", job_prompt_field(job), 0, text);
    else if (event->reason == SCHED_TIMEOUT)
        job_fail(job, 503, "timeout", NULL, 1, text);
    else
        job_fail(job, 500, NULL, NULL, 0, text);
}

static void on_finished(struct gw_part *part, const struct sched_event *event)
{
    struct gw_job *job = part->job;
    struct choice *choice = &job->choices[part->index * job->api.n + event->choice];

    part->n_prompt = event->n_prompt;
    if (!event->choice) /* the others take over what the first one has computed */
        part->n_cached = event->n_cached;
    if (choice->followed)
        conn_unfollow(job->model, choice->followed);
    count_end(job, choice, event);
    if (event->reason == SCHED_ERROR || event->reason == SCHED_TIMEOUT ||
        event->reason == SCHED_TOO_LONG) {
        fail_by(job, event);
        job_cancel(job);
        return;
    }
    if (event->reason == SCHED_CANCELLED)
        return;
    choice_finish(choice, event);
    if (job->http && !job->fail.status && job->api.stream && !respond_chunk(job, choice, true))
        job_abort(job);
}

static void on_part_done(struct gw_part *part)
{
    struct gw_job *job = part->job;
    struct model_metrics *m = &job->model->metrics;

    part->id = 0;
    job->n_live--;
    job->gw->n_running--;
    METRICS_OBSERVE(&m->prompt_len, length, part->n_prompt);
    if (part->first_step_ns)
        METRICS_OBSERVE(&m->computed, length, part->n_prompt - part->n_cached);
    METRICS_OBSERVE(&m->longest, length, part->n_longest);
    m->cached_tokens += part->n_cached;
    if (part->first_step_ns)
        METRICS_OBSERVE(&m->inference, latency, (double)(clock_ns() - part->first_step_ns) / 1e9);
    if (job->n_live)
        return;
    METRICS_OBSERVE(&m->n, few, job->api.n);
    if (job->api.max_tokens != UINT32_MAX)
        METRICS_OBSERVE(&m->max_tokens, length, job->api.max_tokens);
    if (job->http)
        METRICS_OBSERVE(&m->e2e, latency, (double)(clock_ns() - http_received_ns(job->http)) / 1e9);
    respond_end(job);
    job_settle(job);
}

void request_event(void *context, const struct sched_event *event)
{
    struct gw_part *part = event->user;

    switch (event->kind) {
    case SCHED_TOKEN:
        on_token(part, event);
        break;
    case SCHED_PROMPT:
        part->job->model->metrics.prompt_tokens += event->count;
        if (part->job->api.prompt_logprobs >= 0 ||
            (part->job->api.echo && part->job->api.logprobs >= 0))
            part_prompt(part, event);
        break;
    case SCHED_FINISHED:
        on_finished(part, event);
        break;
    case SCHED_DONE:
        on_part_done(part);
        break;
    case SCHED_STALLED:
        fleet_stalled(event->user);
        break;
    }
}

void request_first_step(void *user)
{
    struct gw_part *part = user;

    if (part->first_step_ns || !part->job->http)
        return;
    part->first_step_ns = clock_ns();
    METRICS_OBSERVE(&part->job->model->metrics.queue, latency,
                    (double)(part->first_step_ns - http_received_ns(part->job->http)) / 1e9);
}
