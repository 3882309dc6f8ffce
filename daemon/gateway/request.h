/* SPDX-License-Identifier: Apache-2.0 */
/* A request from its body to its last byte: shared by request.c, request_event.c, choice.c and
 * respond.c. */
#ifndef EMBER_DAEMON_GATEWAY_REQUEST_H
#define EMBER_DAEMON_GATEWAY_REQUEST_H

#include <stdatomic.h>

#include "daemon/gateway/gateway.h"
#include "daemon/gateway/grammar.h"
#include "daemon/gateway/message.h"

/*
 * X(state, what the job waits for)
 * PARSING → FINDING → READING → PREPARING → RUNNING; a job without a client is freed as soon as
 * nobody else (a worker, the scheduler) holds it.
 */
#define JOB_STATES(X)                                                                              \
    X(PARSING, "a worker parses the body")                                                         \
    X(FINDING, "emberd's list of models")                                                          \
    X(READING, "the model's tokenizer")                                                            \
    X(PREPARING, "workers render, tokenize, compile its grammar")                                  \
    X(RUNNING, "the scheduler has its parts")

enum job_state {
#define X(state, what) JOB_##state,
    JOB_STATES(X)
#undef X
};

/* One of a request's n answers to one of its prompts. */
struct choice {
    struct gw_part *part;
    uint32_t index;       /* in the reply */
    uint32_t n_generated; /* tokens */
    uint64_t followed;    /* the sequence by which an instance last knew its place in the grammar */
    struct detok *detok;
    struct stop stop;
    struct message *message; /* chats: what takes reasoning and calls out of the text, or NULL */
    struct buffer text;      /* that may go out and has not (streams), or all of it */
    struct buffer before, after; /* of a plain chunk, around the text */
    struct buffer ids;           /* uint32_t, when asked for, as text */
    /* Log-probabilities not sent yet. For chats `lp` holds the entries; completions have four
     * lists. */
    struct buffer lp, lp_tokens, lp_top, lp_offsets;
    size_t offset; /* characters of the text so far, for text_offset */
    bool begun;    /* its first chunk has been sent */
    bool role_sent;
    bool stopped; /* by a stop string */
    bool ended, prompt_ids_sent;
    const char *reason;      /* finish_reason */
    const char *stop_string; /* stop_reason */
    int64_t stop_token;      /* stop_reason, or -1 */
    uint64_t first_ns, last_ns;
};

/* One prompt: a request of the scheduler. */
struct gw_part {
    struct gw_job *job;
    uint32_t index;
    uint64_t id;                            /* the scheduler's; 0: not submitted, or done */
    uint32_t n_prompt, n_cached, n_longest; /* longest: of its choices, in tokens */
    uint64_t first_step_ns;
    struct buffer prompt_lp;                                    /* prompt_logprobs entries */
    struct buffer echo_tokens, echo_lp, echo_top, echo_offsets; /* the same for echo */
    size_t echo_chars;
    bool echo_lp_begun;
};

struct gw_job {
    struct gw *gw;
    TAILQ_ENTRY(gw_job) link;    /* gw->jobs */
    TAILQ_ENTRY(gw_job) waiting; /* model->waiting, in READING */
    struct http_request *http;   /* NULL: the client has gone */
    enum job_state state;
    struct work work;
    bool with_worker;
    atomic_bool gone; /* its client is: workers need not begin */
    unsigned held;
    enum api_kind kind;
    char *body;
    size_t body_len;
    struct api_request api;
    struct api_error fail; /* status: the request has failed */
    unsigned retry_s;
    struct gw_model *model;
    struct gw_part *parts;
    struct choice *choices;     /* part after part, api.n each */
    uint32_t n_choices, n_live; /* parts that the scheduler has */
    struct stop_set stops;
    uint32_t *suppress; /* end tokens, when there is a min_tokens or a grammar */
    size_t n_suppress;
    struct compiled *grammar; /* what the text keeps to, or NULL */
    char id[80];
    long created;
    uint64_t heartbeat_ns; /* the last sign of life on the stream, or the request's arrival */
    bool streaming;        /* the stream has begun */
    bool any_token;
    struct buffer head; /* of every chunk */
    struct buffer out;  /* scratch */
};

/* Ends every part; their events follow from within. */
void job_cancel(struct gw_job *job);
/* The request fails as a whole, unless it has already. */
void job_fail(struct gw_job *job, int status, const char *code, const char *param, unsigned retry_s,
              const char *text);
/* Frees the job unless somebody still holds it. */
void job_settle(struct gw_job *job);
/* The field that its prompt came in, for errors. */
const char *job_prompt_field(const struct gw_job *job);
/* The reader does not keep up, or memory is short: closes the connection and ends the request. */
void job_abort(struct gw_job *job);

/* ---- choice.c ---- */

int choice_init(struct choice *choice, struct gw_part *part, uint32_t index);
void choice_free(struct choice *choice);
/* A token has come: text and log-probabilities grow. True: a stop string ends the choice. */
bool choice_token(struct choice *choice, const struct sched_event *event);
/* The choice has ended: what was held back belongs to the text, unless a stop string ended it. */
void choice_finish(struct choice *choice, const struct sched_event *event);
/* Prompt log-probabilities of the part, from an event SCHED_PROMPT. */
void part_prompt(struct gw_part *part, const struct sched_event *event);

/* ---- respond.c ---- */

/* The head of the job's chunks and objects. */
void respond_init(struct gw_job *job);
/* Streams: sends what the choice has. `last`: with finish_reason. False: the reader is too slow. */
bool respond_chunk(struct gw_job *job, struct choice *choice, bool last);
/* A comment, so that proxies see life; begins the stream if need be. */
bool respond_heartbeat(struct gw_job *job);
/* The end: the whole object, or the stream's last chunks; or the error. Takes job->http. */
void respond_end(struct gw_job *job);
/* /tokenize and /detokenize, on a worker: the reply, into job->out. */
void respond_tokens(struct gw_job *job);

#endif
