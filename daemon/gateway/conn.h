/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The step protocol with one leased instance: Hello, Welcome, then steps out and results in. What
 * goes wrong is only noted here (conn->failed); fleet.c ends connections, never from inside one of
 * their callbacks.
 */
#ifndef EMBER_DAEMON_GATEWAY_CONN_H
#define EMBER_DAEMON_GATEWAY_CONN_H

#include <event2/bufferevent.h>

#include "daemon/gateway/gateway.h"
#include "proto/step_frame.h"

/* A step in flight. */
struct conn_flight {
    uint64_t id, sent_ns;
    uint32_t n_seqs;
    bool *prompts; /* [n_seqs] whose prompt log-probabilities were asked for; NULL: nobody's */
};

struct conn {
    struct gw_model *model;
    TAILQ_ENTRY(conn) link; /* model->conns */
    char *id, *token, *socket;
    struct bufferevent *bev; /* what the socket does not take at once */
    struct event *readable;
    struct frame_reader reader;
    struct sched_instance *sched; /* NULL until Welcome */
    struct conn_flight flights[SCHED_FLIGHTS];
    unsigned n_flights;
    uint32_t max_tokens;
    uint64_t since_ns;
    /* Structured output: grammars that the instance knows, and sequences that it may forget. */
    struct compiled **grammars;
    size_t n_grammars, cap_grammars, grammar_bytes;
    size_t n_pinned;       /* the first ones, which the step that is being built uses */
    uint64_t grammar_room; /* bytes that it takes */
    uint64_t *unfollowed;
    size_t n_unfollowed;
    bool taken_up; /* a lease of an earlier gateway */
    bool failed;   /* to be ended: `died` says whether by itself */
    bool died;
    char why[160];
};

/* Connects and says Hello; the rest comes with the loop. id, token and socket are copied. */
int conn_new(struct gw_model *model, const char *id, const char *token, const char *socket,
             struct conn **ret, struct error *err);
void conn_free(struct conn *conn);
/* No instance need know any more where this sequence stands in its grammar. */
void conn_unfollow(struct gw_model *model, uint64_t sequence);
void conn_send(struct conn *conn, const struct sched_step *step);
/* Notes the first reason for its end. */
void conn_fail(struct conn *conn, bool died, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
