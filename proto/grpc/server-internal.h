/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private to the server: its structures, and which file does what.
 *
 *   server.c       services, listening, accepting, shutdown
 *   server-conn.c  a connection: nghttp2's callbacks, flood and stall guards
 *   server-call.c  a call: request in, responses and status out, cancelling
 *   health.c, protoset.c, reflection.c  the built-in services
 *
 * References to a call: one by its stream, until nghttp2 closes that; one by the application, from
 * the first call of its handler until it finishes or its cancel callback has run; and one for the
 * time of a handler's run.
 */
#ifndef EMBER_PROTO_GRPC_SERVER_INTERNAL_H
#define EMBER_PROTO_GRPC_SERVER_INTERNAL_H

#include <sys/queue.h>
#include <sys/stat.h>

#include "base/mem.h"
#include "proto/grpc/frame.h"
#include "proto/grpc/http2.h"
#include "proto/grpc/server.h"

enum {
    HEADER_LIST_MAX = 16 * 1024, /* as HTTP/2 counts: name + value + 32 for each */
    TRAILERS_MAX = 8,
    STATUS_TEXT_MAX = 1024,
};

struct service {
    const ProtobufCServiceDescriptor *desc;
    struct grpc_method *methods; /* in the order of desc->methods; handler NULL: not there */
    void *user;
};

struct listener {
    int fd;
    bool tcp;
    struct event *event;
    char *path; /* of our own socket file, with what identified it when we made it */
    struct stat made;
    struct grpc_server *server;
    LIST_ENTRY(listener) link;
};

/* Tokens for events that a client may cause: `burst` at once, `rate` a second after that. */
struct bucket {
    double tokens, burst, rate;
    uint64_t last_ns;
};

struct server_conn {
    struct h2 h2; /* first: h2_ops give us this pointer */
    struct grpc_server *server;
    struct ucred peer;
    bool has_peer;
    LIST_HEAD(, grpc_call) calls;
    LIST_ENTRY(server_conn) link;

    struct bucket resets, controls;
    /* Where we are in the byte stream, to tell an idle connection from one that is half-way. */
    size_t skip; /* bytes of the preface or a frame's payload still to come */
    uint8_t frame_header[9];
    size_t n_frame_header;
    bool in_headers, had_settings, frame_ended;
    struct event *stall_event;
};

struct grpc_call {
    struct grpc_server *server; /* NULL when a forgotten call outlives it */
    struct server_conn *conn;   /* NULL once the stream has gone */
    int32_t stream_id;
    unsigned refs;
    LIST_ENTRY(grpc_call) link;

    const struct service *service;
    const ProtobufCMethodDescriptor *method;
    enum grpc_method_kind kind;
    grpc_handler *handler;
    struct buffer headers; /* name NUL value NUL ... */
    size_t header_list;    /* their size as HTTP/2 counts */
    struct event *deadline_event;
    uint64_t deadline_ns; /* 0: none */

    struct grpc_frame_reader reader;
    ProtobufCMessage *request;
    size_t held;        /* our part of server->stats.held */
    size_t reader_held; /* the reader's part of that */

    struct buffer out;
    size_t out_pos;
    struct buffer trailers; /* as `headers` */
    unsigned n_trailers;
    enum grpc_status status;
    char *status_text;

    bool app_owned;    /* the application has its reference */
    bool answered;     /* response headers submitted */
    bool finished;     /* status known; nothing more may be sent */
    bool trailed;      /* trailers submitted */
    bool deferred;     /* nghttp2 waits for grpc_call_send or the end */
    bool request_done; /* the client has ended its side */
    bool cancelled, cancel_queued;
    void (*on_cancel)(struct grpc_call *, void *user);
    void *on_cancel_user;
    TAILQ_ENTRY(grpc_call) cancel_link;
};

struct health_entry {
    char *service;
    enum grpc_health health;
    LIST_ENTRY(health_entry) link;
};

struct health_watch {
    struct grpc_call *call;
    struct grpc_server *server;
    char *service;
    LIST_ENTRY(health_watch) link;
};

/* One file of a FileDescriptorSet: slices of the set that was given. */
struct proto_file {
    const uint8_t *data; /* the serialised FileDescriptorProto */
    size_t size;
    char *name;
};

struct grpc_server {
    struct event_base *base;
    struct grpc_server_options options;
    struct service *services;
    size_t n_services;
    struct proto_file *files;
    size_t n_files;
    LIST_HEAD(, listener) listeners;
    LIST_HEAD(, server_conn) conns;
    LIST_HEAD(, grpc_call) orphans;  /* calls without a stream, still referred to */
    TAILQ_HEAD(, grpc_call) cancels; /* cancel callbacks to run */
    struct event *cancel_event;
    struct event *accept_event; /* tries accepting again after a pause */
    bool accept_paused;
    struct grpc_server_stats stats;
    ProtobufCServiceDescriptor reflection_alpha;
    LIST_HEAD(, health_entry) health;
    LIST_HEAD(, health_watch) watches;

    bool stopping;
    struct event *grace_event, *done_event;
    void (*done)(void *user);
    void *done_user;
};

/* server.c */
const struct service *server_find(const struct grpc_server *server, const char *path,
                                  const ProtobufCMethodDescriptor **ret_method,
                                  unsigned *ret_index);
void server_conn_gone(struct grpc_server *server);
/* True and counted when `n` more bytes may be held. */
bool server_hold(struct grpc_call *call, size_t n);
void server_release(struct grpc_call *call, size_t n);

/* server-conn.c */
int conn_new(struct grpc_server *server, int fd, const struct ucred *peer, struct error *err);
void conn_free(struct server_conn *conn);
void conn_goaway(struct server_conn *conn);

/* server-call.c */
struct grpc_call *call_new(struct server_conn *conn, int32_t stream_id);
int call_header(struct grpc_call *call, const char *name, size_t name_len, const char *value,
                size_t value_len);
void call_begin(struct grpc_call *call);
void call_data(struct grpc_call *call, const uint8_t *data, size_t n);
void call_request_done(struct grpc_call *call);
void call_stream_closed(struct grpc_call *call);
/* Ends the call at once with a status of ours; what is queued is dropped. */
void call_abort(struct grpc_call *call, enum grpc_status status, const char *text);
void call_unref(struct grpc_call *call);
void server_run_cancels(struct grpc_server *server);

/* health.c, protoset.c, reflection.c */
int health_init(struct grpc_server *server, struct error *err);
void health_free(struct grpc_server *server);
void health_stop(struct grpc_server *server);
void protoset_free(struct grpc_server *server);
const struct proto_file *protoset_by_name(const struct grpc_server *server, const char *name,
                                          size_t len);
/* The file that defines a full name: a message, enum, service, method, field, value or extension.
 */
const struct proto_file *protoset_by_symbol(const struct grpc_server *server, const char *symbol);
/* Calls `import` for each file name that the file imports. */
void protoset_imports(const struct proto_file *file,
                      void (*import)(const char *name, size_t len, void *user), void *user);
int reflection_init(struct grpc_server *server, struct error *err);

#endif
