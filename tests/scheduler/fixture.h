/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A scheduler with one model under a test's hands. A step is written as one word a sequence: the
 * request's letter, its tokens, '*' when a token is sampled, '<' when its input is the token of the
 * step before: "A8 B3* C1*<"; behind '+' when the step joins the one before. Every call checks the
 * scheduler's books.
 */
#ifndef EMBER_TESTS_SCHEDULER_FIXTURE_H
#define EMBER_TESTS_SCHEDULER_FIXTURE_H

#include "scheduler/sched.h"

#define MS UINT64_C(1000000)
#define SECOND UINT64_C(1000000000)
#define EOS 2

struct fixture {
    struct sched *sched;
    struct sched_model *model;
    struct sched_instance *instance; /* the first */
    struct sched_step step, older;
    uint64_t now;
    uint32_t next_token;
    char text[8192];      /* of the last step */
    char events[16384];   /* "A3 A4 A.length A! " */
    uint32_t served[256]; /* tokens run, by letter */
    uint32_t cached[256], generated[256];
    uint64_t ids[256];
    uint32_t stalls;
    char stop_at; /* a letter: its first token makes the listener call sched_stop */
};

struct sched_instance *add_instance(struct fixture *f, const struct sched_limits *limits);
struct sched_limits limits_of(uint32_t pages, uint32_t tokens, uint32_t seqs, bool refs);
/* A model of pages of 4 tokens, and an instance unless `limits` is NULL. */
struct fixture *begin(const struct sched_model_config *config, const struct sched_limits *limits);
/* Checks the books a last time. */
void end(struct fixture *f);
/* A request whose prompt is n tokens beginning at `from`; the letter is its client as well. */
struct sched_request request(struct fixture *f, char letter, uint32_t from, uint32_t n,
                             uint32_t max_tokens);
void submit(struct fixture *f, const struct sched_request *r);
/* Submits one with a prompt of its letter's own. */
void ask(struct fixture *f, char letter, uint32_t n, uint32_t max_tokens);
/* The next step, as text; "" when there is none. */
const char *plan_on(struct fixture *f, struct sched_instance *instance);
const char *plan(struct fixture *f);
/* The step has come back; its tokens are next_token, next_token + 1, ... */
void done_on(struct fixture *f, struct sched_instance *instance, const struct sched_step *step);
void done(struct fixture *f);
/* plan, and done when there is a step. */
const char *run(struct fixture *f);

#endif
