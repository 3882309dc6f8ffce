/* SPDX-License-Identifier: Apache-2.0 */
/* Private to the client. */
#ifndef EMBER_PROTO_GRPC_CLIENT_INTERNAL_H
#define EMBER_PROTO_GRPC_CLIENT_INTERNAL_H

#include <sys/queue.h>

#include "proto/grpc/client.h"
#include "proto/grpc/frame.h"
#include "proto/grpc/http2.h"

enum { CLIENT_TEXT_MAX = ERROR_TEXT_MAX };

/* A connection. After a GOAWAY it serves its calls to their end, and new calls have a new one. */
struct client_conn {
    struct h2 h2; /* first: h2_ops give us this pointer */
    struct grpc_client *client;
    bool draining;
    LIST_HEAD(, grpc_client_call) calls;
    LIST_ENTRY(client_conn) link;
};

struct grpc_client {
    struct event_base *base;
    bool own_base;
    char *target;
    size_t max_message;
    struct client_conn *conn; /* for new calls; NULL: none */
    LIST_HEAD(, client_conn) conns;
    TAILQ_HEAD(, grpc_client_call) ended; /* `done` to be called */
    struct event *ended_event;
    enum grpc_status last_status;
    bool (*interrupted)(void *user); /* NULL: blocking calls cannot be */
    void *interrupted_user;
};

/* Owned by its connection's list until it has ended, then by client->ended until `done` returns. */
struct grpc_client_call {
    struct grpc_client *client;
    struct client_conn *conn; /* NULL once it has ended or its stream is closed */
    int32_t stream_id;        /* 0: no stream any more */
    const ProtobufCMessageDescriptor *response;
    struct grpc_client_callbacks callbacks;
    void *user;
    struct event *deadline_event;

    struct buffer out;
    size_t out_pos;
    struct grpc_frame_reader reader;

    int http_status;
    bool is_grpc;    /* the response's content-type is ours */
    bool has_status; /* grpc-status was received, or we decided */
    bool ended;
    enum grpc_status status;
    char text[CLIENT_TEXT_MAX];
    LIST_ENTRY(grpc_client_call) link;
    TAILQ_ENTRY(grpc_client_call) ended_link;
};

/* client-connect.c: a connected or connecting socket, non-blocking. */
int client_socket(const char *target, bool *ret_connecting, struct error *err);
/* 0, or -EINVAL for a target that client_socket cannot understand. */
int client_check_target(const char *target, struct error *err);

#endif
