/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Discrete-event simulation of a fleet that drives the scheduler's own code.
 *
 * Instances are simulated down to the content of their KV pages: each slot holds the hash of the
 * history that was written there, and a sampled token is a function of the history that is read
 * back through the pages of the step. A page that is shared, reused or replayed wrongly thus gives
 * another token than the one the request would have had alone, and the run fails. With `content`
 * off (large fleets) tokens come from the truth directly.
 *
 * Checked in every run: each token once, in order, the right one; each choice and request ends
 * exactly once and for the right reason; steps within their limits; all books agree (sched_verify,
 * every verify_every events); every request, step, token and sample counted once; nothing left
 * over.
 */
#ifndef EMBER_TESTS_SCHEDULER_SIM_H
#define EMBER_TESTS_SCHEDULER_SIM_H

#include "scheduler/sched.h"

#define SIM_MS UINT64_C(1000000)
#define SIM_S UINT64_C(1000000000)

struct sim_request {
    uint64_t at; /* ns */
    uint64_t client;
    int32_t priority;
    uint32_t n_prompt, min_tokens, max_tokens, n;
    uint32_t group, shared; /* requests of one group begin with the same `shared` tokens */
    uint64_t salt;
    uint64_t cancel_at; /* 0: never */
    uint64_t deadline;  /* 0: none */
    uint32_t poison;    /* > 0: its instance dies when it is to sample its poison-th token */
    bool poison_prompt; /* its instance dies when it runs the last token of its prompt */
    bool prompt_logprobs;
};

struct sim_config {
    struct sched_model_config model;
    struct sched_limits limits;
    uint64_t seed;
    uint32_t instances; /* at the start; with `scale` sched_scale decides from then on */
    bool scale;
    uint64_t spawn_ns;
    double step_ns, token_ns, seq_ns; /* a step takes step + token * tokens + seq * sequences */
    double death_rate;                /* an instance's deaths, a second */
    double stall_rate, refuse_rate;   /* chances of a step */
    double eos;                       /* chance that a sampled token is the stop token */
    bool content;
    uint32_t verify_every; /* events; 0: only at the end */
};

struct sim_report {
    uint64_t requests, finished[6], refused; /* finished: choices by enum sched_reason */
    uint64_t tokens, steps, joined, deaths, spawns, peak_instances;
    double seconds; /* simulated, until the last request ended */
    double ttft_p50, ttft_p99, itl_p50, itl_p99, e2e_p50; /* ms */
    double busy, batch; /* share of instances' time in steps; sequences a step */
    double instance_seconds;
    double pages_peak;        /* share */
    uint64_t innocent_errors; /* SCHED_ERROR of requests that no instance died of */
    uint64_t guilty_errors;   /* of others */
    uint64_t worst_guilt;     /* instances that died of one choice */
    uint64_t digest;          /* of every event: equal runs are equal */
    struct sched_stats stats;
};

/* 0, or -EBADMSG (a broken invariant, the text says which) or what the scheduler returned. */
int sim_run(const struct sim_config *config, const struct sim_request *requests, size_t n,
            struct sim_report *ret, struct error *err);

/* Random numbers of a trace or a run: splitmix64. */
uint64_t sim_random(uint64_t *state);
double sim_uniform(uint64_t *state); /* [0, 1) */

/* Traces: an owned array sorted by time. */
struct sim_shape {
    uint64_t seed;
    uint32_t n, clients;
    double rate; /* Poisson, a second; 0: all at once */
    uint32_t prompt_min, prompt_max, output_min, output_max;
    uint32_t groups, shared; /* 0 groups: no shared prefixes */
};
struct sim_request *sim_trace(const struct sim_shape *shape);
/* Lines "at_ms client n_prompt max_tokens [group shared]", # comments. */
int sim_trace_read(const char *path, struct sim_request **ret, size_t *ret_n, struct error *err);

#endif
