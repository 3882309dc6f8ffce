/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The scheduler's interface in any order: each two or three bytes are a call. The books must agree
 * behind every call, and every request ends exactly once. The listener cancels and stops on its own
 * now and then.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/sched.h"

#define MOST_INSTANCES 3
#define MOST_REQUESTS 200

struct state {
    const uint8_t *data;
    size_t size;
    struct sched *sched;
    struct sched_model *model;
    struct sched_instance *instances[MOST_INSTANCES];
    struct sched_step steps[MOST_INSTANCES][SCHED_FLIGHTS];
    uint32_t n_steps[MOST_INSTANCES];
    uint32_t n_submitted, n_done, finished[MOST_REQUESTS];
    uint64_t ids[MOST_REQUESTS];
    uint64_t now;
    uint32_t random;
    bool stalled[MOST_INSTANCES];
};

static uint8_t byte(struct state *s)
{
    if (!s->size)
        return 0;
    s->size--;
    return *s->data++;
}

static uint32_t chance(struct state *s)
{
    return (s->random = s->random * 1664525 + 1013904223) >> 20;
}

static void on_event(void *context, const struct sched_event *e)
{
    struct state *s = context;
    size_t index = (uintptr_t)e->user;

    if (e->kind == SCHED_STALLED) {
        s->stalled[index] = true;
        return;
    }
    if (e->kind == SCHED_FINISHED)
        s->finished[index]++;
    if (e->kind == SCHED_DONE) {
        s->n_done++;
        s->ids[index] = 0;
        return;
    }
    switch (chance(s) % 16) {
    case 0:
        sched_cancel(s->sched, e->request, s->now);
        break;
    case 1:
        sched_stop(s->sched, e->request, e->choice, s->now);
        break;
    case 2:
        sched_stop(s->sched, e->request, e->choice + 1, s->now);
        break;
    }
}

static void submit(struct state *s)
{
    uint32_t prompt[64], stop = 3, retry;
    uint8_t shape = byte(s), length = byte(s);

    if (s->n_submitted == MOST_REQUESTS)
        return;
    for (uint32_t i = 0; i < 64; i++)
        prompt[i] = i < 40 ? shape % 2 : length + i;
    struct sched_request r = {.model = s->model,
                              .client = shape % 3,
                              .priority = shape / 3 % 2,
                              .prompt = prompt,
                              .n_prompt = length % 65,
                              .max_tokens = length / 16,
                              .min_tokens = shape / 8 % 3,
                              .n = shape / 16 % 4,
                              .prompt_logprobs = shape >= 240,
                              .stop_ids = &stop,
                              .n_stop_ids = 1,
                              .deadline = shape & 8 ? s->now + 1000 : 0,
                              .user = (void *)(uintptr_t)s->n_submitted};
    if (!sched_submit(s->sched, &r, s->now, &s->ids[s->n_submitted], &retry, NULL))
        s->n_submitted++;
}

static void add_instance(struct state *s, uint32_t i)
{
    uint8_t shape = byte(s);
    struct sched_limits limits = {8 + shape % 32, 4,        1 + shape % 24, 1 + shape % 7, 80,
                                  shape & 1,      shape & 2};

    if (!s->instances[i] && sched_instance_add(s->model, &limits, (void *)(uintptr_t)i, s->now,
                                               &s->instances[i], NULL) < 0)
        abort();
    s->stalled[i] = false;
}

static void gone(struct state *s, uint32_t i, bool died)
{
    if (s->instances[i])
        sched_instance_gone(TAKE(s->instances[i]), died, s->now);
    s->n_steps[i] = 0;
}

static void next_step(struct state *s, uint32_t i)
{
    struct sched_step step;

    if (!s->instances[i] || !sched_next_step(s->instances[i], s->now, &step))
        return;
    if (s->n_steps[i] == SCHED_FLIGHTS || !step.n_seqs || !step.n_tokens)
        abort();
    s->steps[i][s->n_steps[i]++] = step;
}

static void step_done(struct state *s, uint32_t i, int error)
{
    struct sched_seq_result results[8] = {0};
    struct error err;

    if (!s->n_steps[i])
        return;
    for (int k = 0; k < 8; k++)
        results[k].token = chance(s) % 32;
    struct sched_result result = {.step = s->steps[i][0].id,
                                  .seqs = results,
                                  .n_seqs = s->steps[i][0].n_samples,
                                  .error = error};
    memmove(s->steps[i], s->steps[i] + 1, --s->n_steps[i] * sizeof s->steps[i][0]);
    if (sched_step_done(s->instances[i], &result, s->now, &err) < 0)
        abort();
}

static void tick(struct state *s)
{
    uint64_t next;

    sched_tick(s->sched, s->now, &next);
    for (uint32_t i = 0; i < MOST_INSTANCES; i++)
        if (s->stalled[i])
            gone(s, i, true);
}

static void scale(struct state *s)
{
    struct sched_scale scaled = sched_scale(s->model, 0, s->now);
    if (scaled.release)
        gone(s, (uint32_t)(uintptr_t)sched_instance_user(scaled.release), false);
}

static void call(struct state *s)
{
    uint8_t op = byte(s);
    uint32_t i = op / 16 % MOST_INSTANCES;

    s->now += op;
    switch (op % 16) {
    case 0:
        gone(s, i, op & 128);
        break;
    case 1:
        add_instance(s, i);
        break;
    case 2:
        if (s->instances[i])
            sched_instance_drain(s->instances[i]);
        break;
    case 3:
    case 6:
        tick(s);
        break;
    case 4:
        scale(s);
        break;
    case 5:
        step_done(s, i, EINVAL);
        break;
    case 7:
        if (s->n_submitted)
            sched_cancel(s->sched, s->ids[op % s->n_submitted], s->now);
        break;
    case 8:
    case 9:
    case 10:
        submit(s);
        break;
    case 11:
    case 12:
    case 13:
        next_step(s, i);
        break;
    default:
        step_done(s, i, 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct state s = {.data = data, .size = size, .random = (uint32_t)size};
    struct sched_config config = {.hash_seed = 1, .event = on_event, .context = &s};
    struct sched_model_config model = {.page_size = 4,
                                       .max_queue = 50,
                                       .stall_ns = 2000,
                                       .idle_ns = 500,
                                       .max_instances = MOST_INSTANCES};
    struct error err;

    if (sched_new(&config, &s.sched, NULL) < 0 ||
        sched_model_add(s.sched, &model, &s.model, NULL) < 0)
        abort();
    add_instance(&s, 0);
    while (s.size) {
        call(&s);
        if (sched_verify(s.sched, &err) < 0)
            abort();
    }
    if (size % 2) /* else sched_free has it all to do */
        sched_model_remove(s.model, s.now);
    if (size % 2 && s.n_done != s.n_submitted)
        abort();
    sched_free(s.sched);
    return 0;
}
