/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler/bench.h"

#include <errno.h>
#include <math.h>

#include "base/mem.h"
#include "scheduler/sched.h"

#define PROMPT 256
#define WARM_UP 200 /* prompts are through by then */
#define STRETCH 200

struct fleet {
    struct sched *sched;
    struct sched_instance *instance;
    struct sched_seq_result *results;
    struct sched_step steps[SCHED_DEPTH];
    uint32_t in_flight;
    uint64_t now;
};

static int submit_all(struct fleet *f, struct sched_model *model, uint32_t n, struct error *err)
{
    uint32_t prompt[PROMPT] = {0}, retry;
    uint64_t id;

    for (uint32_t i = 0; i < n; i++) {
        prompt[0] = i;
        struct sched_request request = {.model = model,
                                        .client = i % 16,
                                        .prompt = prompt,
                                        .n_prompt = PROMPT,
                                        .max_tokens = 1u << 16};
        int r = sched_submit(f->sched, &request, f->now, &id, &retry, err);
        if (r)
            return r < 0 ? r : error_set(err, EBUSY, "the queue is full");
    }
    return 0;
}

static int begin(struct fleet *f, uint32_t n, uint32_t tokens, struct error *err)
{
    struct sched_config config = {.hash_seed = 1};
    struct sched_model_config model_config = {.page_size = 16, .max_queue = n};
    struct sched_limits limits = {n * ((PROMPT + tokens) / 16 + 2), 16, 8192, n, 1u << 20, true};
    struct sched_model *model;

    f->results = mem_alloc(n, sizeof *f->results);
    int r = f->results ? sched_new(&config, &f->sched, err)
                       : error_set(err, ENOMEM, "no memory for %u results", n);
    if (r == 0)
        r = sched_model_add(f->sched, &model_config, &model, err);
    if (r == 0)
        r = sched_instance_add(model, &limits, NULL, 0, &f->instance, err);
    return r == 0 ? submit_all(f, model, n, err) : r;
}

static int step(struct fleet *f, uint32_t number, struct error *err)
{
    while (f->in_flight < SCHED_DEPTH &&
           sched_next_step(f->instance, f->now, &f->steps[f->in_flight]))
        f->in_flight++;
    for (uint32_t i = 0; i < f->steps[0].n_samples; i++)
        f->results[i].token = number * 31 + i;
    struct sched_result result = {
        .step = f->steps[0].id, .seqs = f->results, .n_seqs = f->steps[0].n_samples};
    int r = sched_step_done(f->instance, &result, f->now += 1000, err);
    f->steps[0] = f->steps[1];
    f->in_flight--;
    return r;
}

int sched_bench(uint32_t n, uint32_t rounds, uint64_t (*clock_ns)(void), double *ret_us,
                struct error *err)
{
    struct fleet f = {0};
    double best = INFINITY;
    uint64_t start = 0;
    int r = begin(&f, n, WARM_UP + rounds * STRETCH, err);

    for (uint32_t i = 0; i < WARM_UP + rounds * STRETCH && r == 0; i++) {
        if (i == WARM_UP)
            start = clock_ns();
        r = step(&f, i, err);
        if (i < WARM_UP || (i + 1 - WARM_UP) % STRETCH)
            continue;
        uint64_t end = clock_ns();
        best = fmin(best, (double)(end - start) / 1e3 / STRETCH);
        start = end;
    }
    sched_free(f.sched);
    free(f.results);
    if (r == 0)
        *ret_us = best;
    return r;
}
