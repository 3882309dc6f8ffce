/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the gateway's files share. One loop thread owns everything here; workers see a job's body,
 * its api_request and the model's `struct text` while the job's work is theirs, nothing else.
 *
 *   main.c     options, start, signals, the pump, draining;  beat.c: its timer that rides on steps
 *   http.c     the server;  http_reply.c: what it sends;  guard.c, linger.c: what evhttp lacks
 *   openai.c   from a body to a request (openai_*.c: its values, structured output) and
 *   text.c     from there to token ids, on workers
 *   request.c  the life of a request: parse, find its model, tokenize, submit, end
 *   request_event.c  what the scheduler says of it
 *   choice.c   tokens of one choice: text, stop strings, log-probabilities
 *   respond.c  OpenAI's objects and SSE chunks
 *   fleet.c    models and leases;  watch.c: what emberd says;  policy.c: how many of each
 *   conn.c     the step protocol with one instance
 *   admin.c    everything that generates nothing
 *   metrics.c  counts;  metrics_text.c: the page
 */
#ifndef EMBER_DAEMON_GATEWAY_GATEWAY_H
#define EMBER_DAEMON_GATEWAY_GATEWAY_H

#include <event2/event.h>
#include <sys/queue.h>
#include <time.h>

#include "daemon/gateway/http.h"
#include "daemon/gateway/metrics.h"
#include "daemon/gateway/openai.h"
#include "daemon/gateway/options.h"
#include "daemon/gateway/policy.h"
#include "daemon/gateway/stop.h"
#include "daemon/gateway/text.h"
#include "daemon/gateway/work.h"
#include "scheduler/sched.h"

struct gw;
struct gw_job;
struct conn;
struct fleet;
struct grammar_cache;

/* X(state, word): a model's way until requests can be tokenized for it */
#define GW_MODEL_STATES(X)                                                                         \
    X(NEW, "new")                                                                                  \
    X(READING, "reading") /* a worker reads its tokenizer */                                       \
    X(READY, "ready")

enum gw_model_state {
#define X(state, text) GW_MODEL_##state,
    GW_MODEL_STATES(X)
#undef X
};

TAILQ_HEAD(gw_jobs, gw_job);
TAILQ_HEAD(gw_conns, conn);

/* What requests are told whose model has been replaced. */
#define GW_REPLACED "Another model has been loaded under this name meanwhile; ask again."

/* A model that emberd knows, or has known while somebody here still holds it. */
struct gw_model {
    struct gw *gw;
    TAILQ_ENTRY(gw_model) link;
    char *name, *path;
    char *digest;           /* of its weights; empty: emberd has not said it yet */
    char *labels;           /* of its figures */
    uint32_t max_positions; /* of a sequence, as its config.json says; 0: it does not */
    struct policy policy;
    enum gw_model_state state;
    struct text *text;         /* READY */
    struct sched_model *sched; /* READY */
    struct work reading, settling;
    bool is_settling;  /* a worker has it */
    struct text *read; /* what the worker has read, until it is done */
    struct error read_error;
    struct gw_jobs waiting; /* jobs that wait for READY */
    struct gw_conns conns;
    unsigned starting; /* spawns under way */
    uint64_t retry_ns; /* no spawn before; after a failure */
    uint64_t retry_delay;
    uint64_t driven_ns;   /* when it last had an instance */
    unsigned cache_epoch; /* part of every salt: another one forgets the prefix cache */
    bool asleep;          /* /sleep: no instance is wanted */
    bool replaced;        /* in gw.replaced: nothing more is run for it */
    /* What emberd said last. */
    int warmth;
    uint64_t weights_bytes;
    uint32_t standby, leased, emberd_starting;
    double load_ms;
    bool listed, standby_asked;
    struct model_metrics metrics;
    struct sched_stats stats; /* scratch of metrics_text.c */
};
TAILQ_HEAD(gw_models, gw_model);

struct beat;
struct gw {
    struct gateway_options options;
    struct event_base *base;
    struct work_pool *work, *compilers; /* compilers: of schemas and grammars */
    struct cache *cache;                /* NULL: none, tokenizers are parsed */
    struct grammar_cache *grammars;
    struct http_server *http;
    struct sched *sched;
    struct fleet *fleet;
    struct gw_models models;
    struct gw_models replaced; /* others have their names; kept while somebody holds them */
    struct gw_jobs jobs;
    struct event *pump, *tick, *link; /* link: to emberd, when it has started us */
    uint64_t tick_ns;                 /* when `tick` runs out */
    struct beat *half;                /* the half-second's work */
    bool pump_due;
    unsigned n_jobs, n_running; /* running: handed to the scheduler */
    time_t started;             /* on the calendar */
    uint64_t drain_until;
    bool draining;
};

/* Soon, on the loop: plan steps, scale, set the timer. To be called after anything changed. */
void gw_pump(struct gw *gw);

/* ---- request.c ---- */

/* http_handler; ctx is the struct gw. */
void request_handle(void *ctx, struct http_request *http);
/* sched_event_fn; context is the struct gw. */
void request_event(void *context, const struct sched_event *event);
/* The model has become READY, or (err) could not be read. */
void request_model_ready(struct gw_model *model, const struct error *err);
/* Ends every request of the model that the scheduler has with an error. */
void request_fail_all(struct gw_model *model, int status, unsigned retry_s, const char *text);
/* Ends those that came before then and were begun once: whoever was not has a deadline of its own
 * in the scheduler. */
void request_fail_begun(struct gw_model *model, uint64_t before_ns);
/* Called every half second: heartbeats. */
void request_heartbeats(struct gw *gw);
/* emberd's list of models has been read again, or (error) could not be. */
void request_models_listed(struct gw *gw, const char *error);
/* A step with the part's first tokens has been sent. */
void request_first_step(void *part);

/* ---- fleet.c ---- */

int fleet_new(struct gw *gw, struct error *err);
/* Gives every lease back, unless `keep`: then another gateway takes them up. */
void fleet_free(struct fleet *fleet);
struct gw_model *fleet_find(struct gw *gw, const char *name);
/* Asks emberd for its models again; request_models_listed follows. */
void fleet_list(struct gw *gw);
/* The same, unless the list is new; for those who read it and do not wait. */
void fleet_freshen(struct gw *gw);
/* Begins to read the model's tokenizer, unless that is under way or done. */
void fleet_read_model(struct gw_model *model);
/* Spawns and releases what the scheduler wants. *ret_next: when to ask again. */
void fleet_scale(struct gw *gw, uint64_t now, uint64_t *ret_next);
/* Plans and sends steps until nobody has any to do; ends connections that failed. */
void fleet_run(struct gw *gw);
/* The scheduler found a step overdue (from within its events). */
void fleet_stalled(struct conn *conn);
/* Called every half second: requests whose model has had no instance for too long fail, and models
 * that emberd does not know any more are forgotten when nobody holds them. */
void fleet_check(struct gw *gw);
/* Draining has begun: requests whose model has no instance, and will have none, end. */
void fleet_drain(struct gw *gw);
/* emberd answered lately. */
bool fleet_connected(const struct gw *gw);
/* emberd has said at least once which models there are. */
bool fleet_listed(const struct gw *gw);

/* ---- admin.c ---- */

/* Serves what is no generation; false: no such path. */
bool admin_handle(struct gw *gw, struct http_request *http);

#endif
