/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the scheduler's files share.
 *
 *   sched.c     the scheduler, models, submitting, cancelling, deadlines
 *   seq.c       the life of a sequence: the only place where its state changes
 *   instance.c  instances: come, go, drain; what a death does to those who ran there
 *   batch.c     sched_next_step
 *   done.c      sched_step_done
 *   fair.c      clients, the queue, who is next
 *   suspect.c   who is to blame when an instance dies
 *   route.c     which instance a waiting sequence is meant for
 *   pace.c      how many tokens of prompts a step may have to be over in time
 *   scale.c     how many instances there should be
 *   verify.c    every invariant, and figures
 *
 * The life of a sequence. Where it stands is also where it is linked:
 *
 *   state    meaning                                 linked in                  holds pages
 *   BLOCKED  choice > 0, its prompt is being         its request alone          no
 *            computed by choice 0
 *   QUEUED   waits                                   its client's list, or the  no
 *                                                    list of an instance
 *   PREFILL  known tokens are planned: planned <     running[] of an instance   yes, covering
 *            n_known, nothing is being sampled                                  n_known
 *   DECODE   all are: planned ==                     running[] of an instance   yes, covering
 *            n_known - 1 + pending                                              planned
 *   ENDED    its SCHED_FINISHED has been sent        its request alone          no
 *
 * A sequence is freed with its request, when all of the request's have ended and no step in flight
 * names one.
 */
#ifndef EMBER_SCHEDULER_SCHED_PRIVATE_H
#define EMBER_SCHEDULER_SCHED_PRIVATE_H

#include <assert.h>

#include "scheduler/kvpages.h"
#include "scheduler/sched.h"

/* X(state, what it is called, states it may turn into) */
#define SEQ_STATES(X)                                                                              \
    X(BLOCKED, "blocked", 1 << SEQ_QUEUED | 1 << SEQ_ENDED)                                        \
    X(QUEUED, "queued", 1 << SEQ_PREFILL | 1 << SEQ_ENDED)                                         \
    X(PREFILL, "prefill", 1 << SEQ_DECODE | 1 << SEQ_QUEUED | 1 << SEQ_ENDED)                      \
    X(DECODE, "decode", 1 << SEQ_QUEUED | 1 << SEQ_ENDED)                                          \
    X(ENDED, "ended", 0)

enum seq_state {
#define X(state, text, next) SEQ_##state,
    SEQ_STATES(X)
#undef X
};

#define MAX_CHOICES 128

struct seq_list {
    struct seq *head, *tail;
    uint32_t n;
};

/* Who asks. Kept while it has live sequences, and after that while it is ahead of others. */
struct client {
    uint64_t id;
    /* Weighted tokens planned for it; lifted to the model's floor when it returns. */
    uint64_t served;
    uint32_t live; /* its sequences that have not ended */
    uint32_t running;
    struct seq_list waiting; /* by (priority, arrival); those meant for no instance */
    struct client *next;     /* in its bucket */
    uint32_t at_waiting;     /* index in model->waiting, or UINT32_MAX */
};

struct seq {
    struct request *request;
    uint32_t choice;
    enum seq_state state;
    uint64_t id; /* another with each admission; a step's entry with an older one is void */

    uint32_t *tokens; /* [cap_tokens] prompt, then generated */
    uint32_t n_known, cap_tokens;
    uint32_t planned; /* tokens whose KV a planned step writes: positions 0 .. planned - 1 */
    uint32_t done;    /* of them, those whose step is done */
    uint32_t pending; /* samples in flight */

    struct digest *hashes; /* [n_hashes] of full blocks of known tokens */
    uint32_t n_hashes, cap_hashes;
    uint32_t *pages; /* [n_pages] */
    uint32_t n_pages, cap_pages;
    uint32_t n_registered; /* leading pages that are registered, or were found so */
    bool unregistered;     /* a hash was taken: no page behind may be registered */

    struct sched_instance *instance; /* it runs there, or is meant for it */
    uint32_t slot;                   /* in running[] */
    struct seq *prev, *next;         /* waiting list */
    struct seq_list *list;
    uint64_t waiting_since;
    struct seq *older, *younger; /* QUEUED: model->oldest, by waiting_since */
    uint32_t passed_over;        /* by others with a longer cached prefix */
    bool first;                  /* no step of this id yet */
    bool begun;                  /* planned at least once */
    uint64_t in_step;            /* the last step that it is in */

    uint64_t suspect;   /* suspect.c: the group it is in; 0: nobody suspects it */
    uint64_t struck_by; /* the last death that counted, so that it counts once */
    bool lone;          /* to be run with nobody else in flight */

    uint32_t n_cached, preempted, replayed;
};

struct request {
    uint64_t id;
    struct sched_model *model;
    struct client *client;
    struct request *chain;       /* in its bucket */
    struct request *prev, *next; /* of its model */
    uint32_t holds; /* entries in steps in flight, void ones included; loops over seqs[] */
    bool forgotten; /* SCHED_DONE was sent; freed when nothing holds it */

    int64_t priority;
    uint32_t n_prompt, min_tokens, max_tokens;
    uint32_t n_stop_ids;
    uint32_t *stop_ids;
    bool ignore_eos, prompt_logprobs;
    struct digest root; /* of its block hashes */
    const void *sampling;
    uint64_t deadline;
    void *user;

    uint32_t prompt_reported; /* prompt tokens told of by SCHED_PROMPT */
    uint32_t n, n_live;
    struct seq seqs[]; /* [n] */
};

struct flight {
    uint64_t id;
    uint64_t planned_at;
    uint32_t n, n_tokens, n_samples;
    uint32_t n_prompt;      /* of n_tokens, those of prompts */
    uint32_t cap;           /* max_seqs, or fewer for one that joins */
    struct sched_seq *seqs; /* [cap] what the caller was shown */
    struct seq **entries;   /* [cap] */
    bool joins;             /* the one before it in flight */
    bool stalled;           /* told */
};

struct sched_instance {
    struct sched_model *model;
    uint32_t index; /* in model->instances */
    void *user;
    struct sched_limits limits;
    struct kvpages *pages;

    struct seq **running; /* [max_seqs] */
    uint32_t n_running;
    struct seq_list waiting; /* meant for it, by (priority, arrival) */
    uint32_t waiting_pages;  /* what they would take at most */
    uint64_t work;  /* prompt tokens not yet planned of those that run or are meant for it */
    uint32_t *hits; /* [pages] scratch of admission */
    struct seq **computing; /* [max_seqs] while a step is planned: will register more blocks */
    uint32_t n_computing;

    struct flight flights[SCHED_FLIGHTS]; /* flights[0] is the oldest */
    uint32_t n_flights;
    uint32_t n_measured;        /* tokens of steps that have come back, */
    uint32_t n_measured_prompt; /* those of prompts among them, */
    uint64_t measured;          /* begun then, but not those that join them */
    uint64_t last_done;         /* when its last step came back */
    uint64_t idle_since;
    uint64_t refused; /* the refusal after which the steps in flight are waited for; 0: none */
    bool draining, gone;
    bool surplus; /* draining because scale.c found one fewer enough: it may be taken back */
    bool ready;   /* in the list of sched_ready */
    struct sched_instance *ready_next;
};

struct sched_model {
    struct sched *sched;
    struct sched_model *next;
    struct sched_model_config config; /* defaults filled in; stop_ids owned */

    struct sched_instance **instances;
    uint32_t n_instances, cap_instances;
    struct request *requests, *oldest_request; /* all that live, newest first */
    struct client *clients[256];
    struct client **waiting; /* clients with something in their list */
    uint32_t n_clients, n_waiting_clients, cap_waiting;
    uint64_t floor; /* least `served` of an active client, as last seen; never falls */

    uint32_t n_waiting; /* sequences BLOCKED or QUEUED */
    uint32_t n_running;
    uint32_t n_suspects, n_lone; /* of all sequences that have not ended */
    uint64_t backlog;            /* known tokens of QUEUED sequences */
    struct seq *oldest,
        *youngest; /* QUEUED sequences by waiting_since: figures must not walk them */
    uint64_t next_deadline;
    double speed_tokens, speed_ns; /* decaying sums: tokens run, time taken; never 0 */
    double pace;                   /* pace.c: tokens of a step with prompts */
    double mean_output;            /* of sequences that ended by themselves */
    uint64_t surplus_since; /* scale.c: since when one instance fewer would do; 0: it would not */
    struct sched_stats counters; /* only the counters are used */
};

struct sched {
    struct sched_config config;
    struct sched_model *models;
    struct sched_instance *ready, **ready_tail;
    struct request **buckets; /* by id */
    uint32_t mask, n_requests;
    uint64_t next_request, next_seq, next_step, next_death, next_group;
};

/* ---- seq.c ---- */
void seq_decodes(struct seq *seq); /* PREFILL -> DECODE */
/* Leaves its queue and runs on `instance`, holding `n_hit` pages of its prefix and all others it
 * needs; false: a page or memory is missing. */
bool seq_admit(struct seq *seq, struct sched_instance *instance, const uint32_t *hits,
               uint32_t n_hits);
/* Runs no more, gives its pages back, waits again. */
void seq_requeue(struct seq *seq, uint64_t now);
void seq_unblock(struct seq *seq, uint64_t now);
void request_unblock(struct request *request, uint64_t now);
void seq_end(struct seq *seq, enum sched_reason reason, const char *text, uint64_t now);
/* Pages for `n_tokens` tokens; false when there are not enough (it keeps what it has got) */
bool seq_reserve(struct seq *seq, uint32_t n_tokens);
bool seq_append(struct seq *seq, uint32_t token);
/* Hashes of all full blocks of known tokens; false without memory (fewer hashes, no harm). */
bool seq_hash(struct seq *seq);
/* Full pages of done tokens become findable. */
void seq_register(struct seq *seq);
const char *seq_state_text(enum seq_state state);

static inline uint32_t seq_generated(const struct seq *seq)
{
    return seq->n_known - seq->request->n_prompt;
}
static inline bool seq_runs(const struct seq *seq)
{
    return seq->state == SEQ_PREFILL || seq->state == SEQ_DECODE;
}
static inline uint32_t pages_for(const struct sched_model *model, uint64_t tokens)
{
    return (uint32_t)((tokens + model->config.page_size - 1) / model->config.page_size);
}
/* Leading blocks of known tokens that may come from the cache: all but the last token's. */
uint32_t seq_shareable(const struct seq *seq);

/* ---- sched.c ---- */
double model_speed(const struct sched_model *model);     /* tokens a second, of one instance */
uint64_t model_backlog(const struct sched_model *model); /* tokens that wait, outputs estimated */
void sched_emit(struct sched *sched, const struct sched_event *event);
void request_free(struct request *request);
void request_forget(struct request *request); /* out of the maps; SCHED_DONE */
void request_drop(struct request *request);   /* one hold less; may free it */
/* Ends those of its choices that have not ended. */
void request_end(struct request *request, enum sched_reason reason, const char *text, uint64_t now);

/* ---- suspect.c ---- */
/* Who is in flight together, void entries too; zeros: nobody, or nobody is suspected. */
struct company {
    const struct seq *any; /* one of them */
    bool mixed;            /* there are others */
    bool lone;
    uint64_t group; /* of the suspects */
};
struct company company_of(const struct sched_instance *instance);
void company_add(struct company *company, const struct seq *seq);
/* May it be in flight beside them? */
static inline bool company_takes(const struct company *company, const struct seq *seq)
{
    if (!company->any || (company->any == seq && !company->mixed))
        return true;
    return !seq->lone && !company->lone &&
           (!seq->suspect || !company->group || seq->suspect == company->group);
}
/* It has brought a token, or has ended. */
void suspect_clear(struct seq *seq);
/*
 * What was in flight failed as a whole; may be told once for each step of one `death`. The one
 * whose fault it was, if that is known; never, when it is not `certain` that the fault lies in
 * these steps.
 */
struct seq *suspect_death(struct sched_instance *instance, const struct flight *flights,
                          uint32_t n_flights, uint64_t death, bool certain);

/* ---- fair.c ---- */
struct client *client_get(struct sched_model *model, uint64_t id); /* NULL: no memory */
void client_join(struct sched_model *model, struct client *client);
void client_leave(struct sched_model *model, struct client *client);
void client_charge(struct sched_model *model, struct client *client, uint64_t cost);
void clients_free(struct sched_model *model);
/* True when a is to be served before b. */
bool seq_before(const struct seq *a, const struct seq *b);
void queue_insert(struct seq_list *list, struct seq *seq);
void queue_remove(struct seq *seq);
/* Into its client's list (instance NULL) or an instance's. */
void queue_push(struct seq *seq, struct sched_instance *instance);
void queue_pull(struct seq *seq);
/* The next for `instance` among those meant for it and those meant for none, who may join
 * `company`; NULL: none. */
struct seq *queue_next(struct sched_instance *instance, const struct company *company);
/* The next of those that are to be run alone. */
struct seq *queue_next_lone(const struct sched_instance *instance);
/* Whom `seq`, for which there is no room, may displace, or NULL. */
struct seq *fair_victim(const struct sched_instance *instance, const struct seq *seq);

/* ---- route.c ---- */
/* Leading blocks of the sequence that the instance's pages hold. */
uint32_t route_hits(const struct sched_instance *instance, const struct seq *seq);
/* Puts a QUEUED sequence into a list: an instance with room, or none. */
void route(struct seq *seq);
/* Takes those meant for `instance` back into the clients' lists. */
void route_return(struct sched_instance *instance);
/* Whether the tokens of the sequence, and one more, fit the instance when it is empty; any
 * instance. */
bool route_fits(const struct sched_instance *instance, uint32_t n_known, bool samples);
bool route_fits_any(const struct sched_model *model, uint32_t n_known, bool samples);
/* Sequences that may run there when it is one of them. */
uint32_t route_seats(const struct sched_instance *instance, const struct seq *seq);

/* ---- pace.c ---- */
void pace_init(struct sched_model *model);
/* A step of so many tokens, some of prompts, has taken so long. */
void pace_learn(struct sched_model *model, uint32_t tokens, double ns);
/* Tokens of prompts that a step may have beside so many others; with those of newcomers, who may
 * have a few more in a step that they join. */
uint32_t pace_prompts(const struct sched_model *model, uint32_t others, bool newcomers);

/* ---- instance.c ---- */
void instance_ready(struct sched_instance *instance);
void instance_free(struct sched_instance *instance);

#endif
