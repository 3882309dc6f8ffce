/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void on_event(void *context, const struct sched_event *e)
{
    struct fixture *f = context;
    char *out = f->events + strlen(f->events);
    size_t room = sizeof f->events - strlen(f->events);
    int letter = (int)(uintptr_t)e->user;

    switch (e->kind) {
    case SCHED_TOKEN:
        snprintf(out, room, "%c%u ", letter, e->token);
        if (letter == f->stop_at)
            sched_stop(f->sched, e->request, e->choice, f->now);
        break;
    case SCHED_FINISHED:
        snprintf(out, room, "%c.%s ", letter, sched_reason_text(e->reason));
        f->cached[letter] = e->n_cached;
        f->generated[letter] += e->n_generated;
        break;
    case SCHED_DONE:
        snprintf(out, room, "%c! ", letter);
        break;
    case SCHED_STALLED:
        f->stalls++;
        break;
    case SCHED_PROMPT:
        break;
    }
}

struct sched_instance *add_instance(struct fixture *f, const struct sched_limits *limits)
{
    struct sched_instance *instance = NULL;
    assert_int_equal(0, sched_instance_add(f->model, limits, NULL, f->now, &instance, NULL));
    return instance;
}

struct sched_limits limits_of(uint32_t pages, uint32_t tokens, uint32_t seqs, bool refs)
{
    return (struct sched_limits){pages, 4, tokens, seqs, 4096, refs};
}

struct fixture *begin(const struct sched_model_config *config, const struct sched_limits *limits)
{
    static const uint32_t eos = EOS;
    struct fixture *f = calloc(1, sizeof *f);
    struct sched_config sc = {.hash_seed = 1, .event = on_event, .context = f};
    struct sched_model_config mc = config ? *config : (struct sched_model_config){0};

    mc.page_size = 4;
    mc.stop_ids = &eos;
    mc.n_stop_ids = 1;
    f->now = SECOND;
    f->next_token = 100;
    assert_int_equal(0, sched_new(&sc, &f->sched, NULL));
    assert_int_equal(0, sched_model_add(f->sched, &mc, &f->model, NULL));
    if (limits)
        f->instance = add_instance(f, limits);
    return f;
}

static void verify(struct fixture *f)
{
    struct error err = {0};
    if (sched_verify(f->sched, &err) < 0)
        fail_msg("%s", err.text);
}

void end(struct fixture *f)
{
    verify(f);
    sched_free(f->sched);
    free(f);
}

struct sched_request request(struct fixture *f, char letter, uint32_t from, uint32_t n,
                             uint32_t max_tokens)
{
    static uint32_t prompts[16][4096];
    static int next;
    uint32_t *prompt = prompts[next++ % 16];

    for (uint32_t i = 0; i < n; i++)
        prompt[i] = from + i;
    return (struct sched_request){.model = f->model,
                                  .client = (uint64_t)letter,
                                  .prompt = prompt,
                                  .n_prompt = n,
                                  .max_tokens = max_tokens,
                                  .user = (void *)(uintptr_t)letter};
}

void submit(struct fixture *f, const struct sched_request *r)
{
    uint32_t retry;
    assert_int_equal(0,
                     sched_submit(f->sched, r, f->now, &f->ids[(uintptr_t)r->user], &retry, NULL));
}

void ask(struct fixture *f, char letter, uint32_t n, uint32_t max_tokens)
{
    struct sched_request r = request(f, letter, 1000u * (uint32_t)letter, n, max_tokens);
    submit(f, &r);
}

const char *plan_on(struct fixture *f, struct sched_instance *instance)
{
    struct sched_step step;
    size_t n;

    verify(f);
    f->text[0] = '\0';
    if (!sched_next_step(instance, f->now, &step))
        return f->text;
    f->older = f->step;
    f->step = step;
    n = (size_t)snprintf(f->text, sizeof f->text, "%s", step.joins ? "+" : "");
    for (uint32_t i = 0; i < step.n_seqs; i++) {
        const struct sched_seq *s = &step.seqs[i];
        int letter = (int)(uintptr_t)s->user;
        f->served[letter] += s->n_tokens;
        n += (size_t)snprintf(f->text + n, sizeof f->text - n, "%s%c%u%s%s", i ? " " : "", letter,
                              s->n_tokens, s->sample ? "*" : "", s->token_from_previous ? "<" : "");
    }
    verify(f);
    return f->text;
}

const char *plan(struct fixture *f)
{
    return plan_on(f, f->instance);
}

void done_on(struct fixture *f, struct sched_instance *instance, const struct sched_step *step)
{
    struct sched_seq_result results[64] = {0};
    struct error err = {0};

    f->now += MS;
    for (uint32_t i = 0; i < step->n_samples; i++)
        results[i].token = f->next_token++;
    struct sched_result result = {.step = step->id, .seqs = results, .n_seqs = step->n_samples};
    if (sched_step_done(instance, &result, f->now, &err) < 0)
        fail_msg("%s", err.text);
    verify(f);
}

void done(struct fixture *f)
{
    done_on(f, f->instance, &f->step);
}

const char *run(struct fixture *f)
{
    if (*plan(f))
        done(f);
    return f->text;
}
