/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The batching scheduler: which sequences run in the next step of which instance, on which KV
 * pages. Pure: no socket, clock, device or thread; time is a parameter (nanoseconds of one
 * monotonic clock), the executor is whoever calls sched_next_step and sched_step_done. One thread.
 *
 *     sched_submit ──▶ waiting ──▶ sched_next_step ──▶ (instance) ──▶ sched_step_done ──▶ events
 *
 * A request has n choices; each is a sequence of its own. The scheduler holds every token of a
 * sequence, so that a sequence can be taken off an instance at any time (pages run out, the
 * instance dies) and be replayed: the tokens that are known are fed again, prompt_len stays the
 * prompt's, and sampling goes on at the sample_index where it stopped. Given an instance whose
 * results depend on tokens, prompt_len, seed and sample_index alone, the client sees the same
 * tokens, each once, whatever happened.
 *
 * The caller's loop, after every other call:
 *
 *     while ((instance = sched_ready(sched)))
 *         while (sched_next_step(instance, now, &step))
 *             send(instance, step);
 *
 * Two steps in flight. With token_refs, the second step decodes a sequence whose last token is
 * still being sampled: `token_from_previous` says that the input is the token sampled for the same
 * sequence by the step before. Without (step.proto has no such reference yet), a second step is
 * planned only behind steps that sample nothing, which is exact and costs nothing: a decode has to
 * wait for its token, and cutting the batch in two halves would read the weights twice.
 *
 * Joining. A request that comes while two steps are in flight need not wait for both: a small third
 * one (`joins`) is planned, which the instance runs together with the second when that has not
 * begun, else behind it. It holds new sequences alone, fits into what the second has left, and is
 * planned only when no page can have changed hands since. Its result follows the second's.
 *
 * Steps run in the order in which they were planned. A page that a sequence gave up while a step
 * that writes it is in flight may thus be handed on at once: its next user's step comes later.
 */
#ifndef EMBER_SCHEDULER_SCHED_H
#define EMBER_SCHEDULER_SCHED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"

struct sched;          /* all models */
struct sched_model;    /* a model's queue and instances */
struct sched_instance; /* an instance that may be sent steps */

#define SCHED_DEPTH 2 /* steps in flight, of one instance, */
#define SCHED_JOINS 4 /* and steps that join one of them */
#define SCHED_FLIGHTS (SCHED_DEPTH + SCHED_JOINS)

/* X(NAME, OpenAI's finish_reason or the word for logs) */
#define SCHED_REASONS(X)                                                                           \
    X(STOP, "stop")           /* a stop token, or sched_stop */                                    \
    X(LENGTH, "length")       /* max_tokens, the model's positions, or all KV pages */             \
    X(CANCELLED, "cancelled") /* sched_cancel, sched_model_remove */                               \
    X(TIMEOUT, "timeout")     /* not begun by its deadline */                                      \
    X(TOO_LONG, "too_long")   /* not begun: its prompt fits no instance that has come */           \
    X(ERROR, "error")         /* see the event's text */

enum sched_reason {
#define X(name, text) SCHED_##name,
    SCHED_REASONS(X)
#undef X
};
/* "stop", "length", ... */
const char *sched_reason_text(enum sched_reason reason);

/* ---- what comes out: events ---- */

struct sched_logprob {
    uint32_t token;
    float logprob;
};

enum sched_event_kind {
    SCHED_TOKEN,    /* one more token of a choice */
    SCHED_PROMPT,   /* prompt tokens first .. first + count - 1 are computed, or were cached */
    SCHED_FINISHED, /* a choice has ended; nothing more comes of it */
    SCHED_DONE,     /* every choice has: the request is forgotten behind this event */
    SCHED_STALLED,  /* a step of `instance` is overdue: end it, then call sched_instance_gone */
};

struct sched_event {
    enum sched_event_kind kind;
    uint64_t request; /* as sched_submit returned it */
    void *user;       /* the request's; the instance's with SCHED_STALLED */
    uint32_t choice;
    uint64_t now; /* SCHED_TOKEN: as sched_step_done was told */
    /* SCHED_TOKEN */
    uint32_t token, index; /* index: 0 for the choice's first */
    float logprob;
    const struct sched_logprob *top;
    uint32_t n_top;
    /* SCHED_PROMPT: each position once, in order, of choice 0 alone */
    uint32_t first, count;
    const void *prompt_logprobs; /* what the result carried, or NULL; */
    uint32_t row;                /* its row for `first` */
    /* SCHED_FINISHED */
    enum sched_reason reason;
    const char *text; /* SCHED_TIMEOUT, SCHED_TOO_LONG and SCHED_ERROR: why, for people */
    uint32_t n_prompt, n_cached, n_generated;
    uint32_t preempted, replayed; /* how often it was */
    /* SCHED_STALLED */
    struct sched_instance *instance;
};

/*
 * Called from within sched_* calls that say so. It may call sched_cancel, sched_stop and
 * sched_submit, nothing else. What the event points to is valid during the call.
 */
typedef void (*sched_event_fn)(void *context, const struct sched_event *event);

struct sched_config {
    uint64_t hash_seed; /* secret and random: block hashes of one process cannot be guessed */
    sched_event_fn event;
    void *context;
};

/* -ENOMEM when memory is short. */
int sched_new(const struct sched_config *config, struct sched **ret, struct error *err);
/* Forgets everything without events. */
void sched_free(struct sched *sched);
DEFINE_CLEANUP(struct sched *, sched_free)

/* ---- models ---- */

struct sched_model_config {
    uint32_t page_size;       /* tokens of a KV page, of every instance; 1 .. 4096 */
    uint32_t max_queue;       /* sequences that may wait; 0: 1024 */
    uint32_t step_tokens;     /* budget of a step; 0: the instance's max_tokens */
    uint32_t prefill_tokens;  /* of it for prompts, in steps that decode as well; 0: no limit */
    uint64_t step_ns;         /* prompts are cut so that a step takes about so long; 0: no matter */
    uint32_t output_weight;   /* cost of a generated token in prompt tokens, for fairness; 0: 2 */
    bool no_prefix_cache;     /* choices of one request share their prompt all the same */
    uint32_t rope_exact_len;  /* rope depends on the prompt's length beyond this many; 0: never */
    const uint32_t *stop_ids; /* the model's end-of-sequence tokens; copied */
    uint32_t n_stop_ids;
    uint64_t stall_ns; /* a step may take this long; 0: 30 s */
    /* scale.h */
    uint32_t min_instances, max_instances; /* max 0: 1 */
    uint32_t standby;                      /* idle instances wanted beside those in use */
    uint64_t wait_target_ns;               /* oldest waiting time that is acceptable; 0: 1 s */
    uint64_t backlog_target_ns;            /* the backlog is to be worked off within; 0: 5 s */
    uint64_t idle_ns;                      /* idle this long: given back; 0: 60 s */
    uint64_t spawn_ns;   /* how long a new instance takes, for Retry-After; 0: 100 ms */
    double tokens_per_s; /* an instance's speed until it is measured; 0: 1000 */
};

/* -EINVAL: page_size. */
int sched_model_add(struct sched *sched, const struct sched_model_config *config,
                    struct sched_model **ret, struct error *err);
/* Ends its requests (SCHED_CANCELLED, events) and forgets its instances. */
void sched_model_remove(struct sched_model *model, uint64_t now);

/* ---- instances ---- */

struct sched_limits {
    uint32_t pages;         /* KV pages 0 .. pages-1 are the scheduler's to hand out */
    uint32_t page_size;     /* must be the model's */
    uint32_t max_tokens;    /* of one step */
    uint32_t max_seqs;      /* of one step */
    uint32_t max_positions; /* of one sequence */
    bool token_refs;        /* understands token_from_previous */
    bool joins;             /* and sched_step.joins */
};

/* -EINVAL when a limit is 0 or page_size differs. `user` comes back from sched_instance_user. */
int sched_instance_add(struct sched_model *model, const struct sched_limits *limits, void *user,
                       uint64_t now, struct sched_instance **ret, struct error *err);
void *sched_instance_user(const struct sched_instance *instance);
/* More tokens a step, as the instance adopts buckets. */
void sched_instance_grow(struct sched_instance *instance, uint32_t max_tokens);
/*
 * It has gone; the handle is dead. Its sequences wait again, at the place where they were. `died`:
 * not by anybody's order: those in flight become suspects, and are replayed together. If another
 * instance dies of them, in smaller and smaller groups (suspect.c), so that a request fails
 * (SCHED_ERROR) only when two instances in a row have died of it, the last with nothing else in
 * flight.
 */
void sched_instance_gone(struct sched_instance *instance, bool died, uint64_t now);
/* Takes no new sequence any more; those that run go on. sched_scale releases it when it is idle. */
void sched_instance_drain(struct sched_instance *instance);
/* Takes new ones again. */
void sched_instance_resume(struct sched_instance *instance);
bool sched_instance_idle(
    const struct sched_instance *instance); /* no sequence, no step in flight */

/* ---- requests ---- */

struct sched_request {
    struct sched_model *model;
    uint64_t client;        /* fairness: who asks (API key, tenant) */
    int64_t priority;       /* lower goes first */
    const uint32_t *prompt; /* n_prompt >= 1 tokens; copied */
    uint32_t n_prompt;
    uint32_t min_tokens, max_tokens; /* max 0: the prompt is computed, nothing is sampled */
    uint32_t n;                      /* choices; 0: 1 */
    const uint32_t *stop_ids;        /* beside the model's; copied */
    uint32_t n_stop_ids;
    bool ignore_eos;        /* the model's stop_ids do not stop it; the request's do */
    bool prompt_logprobs;   /* compute every prompt row: nothing is taken from the cache */
    const void *cache_salt; /* sequences share pages only under the same salt */
    size_t cache_salt_len;
    const void *sampling; /* borrowed until SCHED_DONE; handed to each step */
    uint64_t deadline;    /* of the first token's step being planned; 0: none */
    void *user;
};

/* sched_submit's positive return: the queue is full. */
#define SCHED_FULL 1

/*
 * 0 and *ret_id (never 0); SCHED_FULL and *ret_retry_s, an estimate in seconds, 1 .. 60; -EINVAL
 * (empty prompt, n too large); -E2BIG: longer than the positions or the pages of any instance so
 * far known; -ENOMEM. max_tokens beyond the positions left is cut: it ends by SCHED_LENGTH. No
 * events.
 */
int sched_submit(struct sched *sched, const struct sched_request *request, uint64_t now,
                 uint64_t *ret_id, uint32_t *ret_retry_s, struct error *err);
/* Ends all choices (SCHED_CANCELLED, events). Nothing of it is in any step planned from now on.
 * Unknown ids are ignored. */
void sched_cancel(struct sched *sched, uint64_t id, uint64_t now);
/* Ends one choice as SCHED_STOP: its text holds a stop string (events). */
void sched_stop(struct sched *sched, uint64_t id, uint32_t choice, uint64_t now);

/* ---- steps ---- */

struct sched_seq {
    uint64_t id; /* of the sequence on this instance: another after a preemption or a replay */
    uint64_t request;
    uint32_t choice;
    void *user;             /* the request's */
    const void *sampling;   /* the request's */
    const uint32_t *tokens; /* to be run at position, position + 1, ... */
    uint32_t n_tokens, position, prompt_len;
    const uint32_t *pages; /* all pages, covering position + n_tokens */
    uint32_t n_pages;
    uint32_t sample_index;    /* tokens sampled before: the seed's counter */
    bool sample;              /* the last token's logits are wanted */
    bool token_from_previous; /* tokens[0] (the only one) is what the step before samples for this
                                 id */
    bool suppress_stop;       /* below min_tokens: stop tokens must not be sampled */
    bool prompt_logprobs;     /* rows of prompt tokens are wanted */
    bool first;               /* first step of this id: what came before is in `known` */
    /* All tokens known so far, prompt and generated: for penalties. */
    const uint32_t *known;
    uint32_t n_known;
};

struct sched_step {
    uint64_t id;
    const struct sched_seq *seqs; /* valid until the next call for this instance */
    uint32_t n_seqs, n_tokens, n_samples;
    bool joins; /* to be run with the step before, which has other sequences, if that has not begun
                 */
};

struct sched_seq_result {
    uint32_t token;
    float logprob;
    const struct sched_logprob *top;
    uint32_t n_top;
    bool ended; /* nothing may follow: SCHED_STOP, whatever min_tokens says */
};

struct sched_result {
    uint64_t step;
    const struct sched_seq_result *seqs; /* those with `sample`, in the step's order */
    uint32_t n_seqs;
    const void *const *prompt_logprobs; /* one per sequence of the step, or NULL */
    int error; /* the instance refused the step (a positive errno): nothing was changed by it */
    const char *error_text;
};

/* An instance that may have something to do; each is returned once per change. NULL: none. */
struct sched_instance *sched_ready(struct sched *sched);
/* Plans a step: true and *ret_step when it is to be sent now. May call back (a sequence that cannot
 * go on ends). */
bool sched_next_step(struct sched_instance *instance, uint64_t now, struct sched_step *ret_step);
/*
 * The result of the oldest step in flight; calls back. -EINVAL when it is not, or a count is wrong:
 * the instance is broken and the caller ends it. A refused step's sequences are tried again, as
 * after a death: one that is refused twice in a row, the last time by itself, fails.
 */
int sched_step_done(struct sched_instance *instance, const struct sched_result *result,
                    uint64_t now, struct error *err);

/*
 * Deadlines, stalled steps, sequences that fit no instance any more (events). *ret_next: when to
 * call again; UINT64_MAX: no need. Call it behind sched_instance_gone, and once a second while
 * there is work.
 */
void sched_tick(struct sched *sched, uint64_t now, uint64_t *ret_next);

/* ---- scale ---- */

struct sched_scale {
    uint32_t wanted; /* instances that the model should have, starting ones included */
    struct sched_instance *release; /* idle: end it, then sched_instance_gone; or NULL */
    const char *why;                /* a word for logs and metrics */
    uint64_t recheck;               /* ask again then, whatever happens; UINT64_MAX: no need */
};
/* `starting`: instances on their way. See scale.h for the policy. */
struct sched_scale sched_scale(struct sched_model *model, uint32_t starting, uint64_t now);

/* ---- figures ---- */

/* X(name, help): counters since the start, for metrics */
#define SCHED_COUNTERS(X)                                                                          \
    X(submitted, "requests taken")                                                                 \
    X(refused, "requests refused: queue full")                                                     \
    X(ended, "requests ended")                                                                     \
    X(steps, "steps planned")                                                                      \
    X(prompt_tokens, "prompt tokens computed, replays included")                                   \
    X(cached_tokens, "prompt tokens found in the prefix cache")                                    \
    X(queried_tokens, "prompt tokens looked up in the prefix cache")                               \
    X(generated_tokens, "tokens handed to clients")                                                \
    X(wasted_tokens, "tokens sampled for nobody: ended or taken off in flight")                    \
    X(preemptions, "sequences taken off for pages or fairness")                                    \
    X(replays, "sequences taken off by an instance's end")                                         \
    X(failovers, "instances that died with sequences")

struct sched_stats {
#define X(name, help) uint64_t name;
    SCHED_COUNTERS(X)
#undef X
    uint32_t waiting, running; /* sequences, now */
    uint32_t instances;
    uint64_t pages, pages_used; /* used: held by sequences */
    uint64_t backlog_tokens;    /* of waiting sequences: prompts, and outputs as of late */
    uint64_t oldest_wait_ns;    /* of a waiting sequence; 0: none */
    double tokens_per_s;        /* measured, of one instance */
};
/* A model's figures, counters and those of now. */
void sched_model_stats(const struct sched_model *model, uint64_t now, struct sched_stats *ret);

/* Checks every invariant (slow; for tests): 0, or -EBADMSG and what is wrong. */
int sched_verify(const struct sched *sched, struct error *err);

#endif
