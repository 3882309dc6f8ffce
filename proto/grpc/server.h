/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A gRPC server (gRPC over HTTP/2, grpc/doc/PROTOCOL-HTTP2.md) on an event loop. One thread: every
 * function here is called from the loop's thread, every callback comes from the loop.
 *
 * Services are protobuf-c service descriptors plus a handler for each method. protobuf-c does not
 * say whether a method streams, so the registration does.
 *
 * A call's life. The handler is called with a request and owns the call from then on. It ends that
 * ownership in one of two ways, each of which makes the pointer invalid:
 *   - it calls grpc_call_finish() (or _fail), in the handler or any time later;
 *   - its cancel callback, set by grpc_call_on_cancel(), returns.
 * The cancel callback runs once when the client resets the call or disconnects, when the deadline
 * passes, when a slow reader overruns its queue, or when the server shuts down. It comes from the
 * loop, never from inside another function of this header. A call without a cancel callback stays
 * valid, and deaf, until grpc_call_finish(); so a handler that finishes before it returns needs
 * none.
 * A GRPC_BIDI call without one ends by itself: its handler, which is only called while there is a
 * client, would never learn that it should finish. Who keeps such a call elsewhere sets a callback.
 *
 * What a client can make us hold is bounded by the options below.
 */
#ifndef EMBER_PROTO_GRPC_SERVER_H
#define EMBER_PROTO_GRPC_SERVER_H

#include <event2/event.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#include "base/error.h"
#include "proto/grpc/status.h"

struct grpc_server;
struct grpc_call;

/* Zero in any field means its default. */
struct grpc_server_options {
    size_t max_message;       /* bytes, of a request or a response: 4 MiB */
    size_t max_queued;        /* bytes of responses that wait for one call's reader: 8 MiB */
    size_t max_held;          /* bytes of requests and queues over all calls: 256 MiB */
    unsigned max_connections; /* 512; more wait in the listen backlog */
    unsigned max_streams;     /* calls at a time on a connection: 256 */
    unsigned stall_ms;        /* a connection half-way through a frame or preface: 10,000 ms */
    unsigned reset_budget;   /* calls a client may reset in a burst (refills 100 a second): 1,000 */
    unsigned control_budget; /* PING, SETTINGS, empty frames in a burst (1,000 a second): 10,000 */
    /*
     * Admits or refuses a peer of a Unix socket; asked again with each of its other groups as gid
     * before it is refused. Default: our own effective uid, or root.
     * TCP peers are not asked about: they are admitted by having been listened for.
     */
    bool (*admit)(const struct ucred *peer, void *user);
    void *admit_user;
};

/* `options` may be NULL. The base must outlive the server. 0 or -ENOMEM. */
int grpc_server_new(struct event_base *base, const struct grpc_server_options *options,
                    struct grpc_server **ret_server, struct error *err);

/* Drops every connection (cancel callbacks run first). Not from inside a handler or callback. */
void grpc_server_free(struct grpc_server *server);

enum grpc_method_kind {
    GRPC_UNARY,         /* one request, one response */
    GRPC_SERVER_STREAM, /* one request, any number of responses */
    GRPC_BIDI, /* the handler is called for each request, then once with NULL at their end */
};

/*
 * `request` lives as long as the call (GRPC_BIDI: until the handler returns). A GRPC_BIDI handler
 * is not called any more once the call is finished.
 */
typedef void grpc_handler(struct grpc_call *call, const ProtobufCMessage *request, void *user);

struct grpc_method {
    const char *name; /* as in the .proto: "LoadModel" */
    enum grpc_method_kind kind;
    grpc_handler *handler;
};

/*
 * Registers a service; methods without an entry answer UNIMPLEMENTED. The descriptor must outlive
 * the server. -EINVAL: a name that the service does not have, or a request type that contains
 * itself (protobuf-c unpacks by recursion without a limit). -EEXIST: registered already.
 */
int grpc_server_add_service(struct grpc_server *server, const ProtobufCServiceDescriptor *service,
                            const struct grpc_method *methods, size_t n_methods, void *user,
                            struct error *err);

/*
 * Gives a serialised FileDescriptorSet to server reflection; `data` must outlive the server.
 * -EBADMSG when it does not parse. The library's own services are there already.
 */
int grpc_server_add_protoset(struct grpc_server *server, const uint8_t *data, size_t size,
                             struct error *err);

/*
 * Listening. A Unix socket is created with `mode`; a socket file that nobody listens on any more is
 * replaced, one that is in use is -EADDRINUSE. The file is removed at shutdown if it is still ours.
 */
int grpc_server_listen_unix(struct grpc_server *server, const char *path, mode_t mode,
                            struct error *err);
/* An inherited listening socket of any stream family; takes fd when it succeeds. */
int grpc_server_listen_fd(struct grpc_server *server, int fd, struct error *err);
/*
 * Plain TCP. Without encryption and credentials only loopback addresses (127.0.0.0/8, ::1) are
 * accepted, others are -EACCES. Port 0 chooses one; *ret_port (may be NULL) is the port.
 */
int grpc_server_listen_tcp(struct grpc_server *server, const char *address, uint16_t port,
                           uint16_t *ret_port, struct error *err);
/* A connected stream socket as a connection; takes fd always. -EACCES when the peer is refused. */
int grpc_server_add_connection(struct grpc_server *server, int fd, struct error *err);

/*
 * Stops accepting and sends GOAWAY; health says NOT_SERVING. Calls may finish for grace_ms, then
 * they end with UNAVAILABLE. `done` (may be NULL) comes from the loop when the last connection has
 * gone; it may free the server. A second call only shortens the grace.
 */
void grpc_server_shutdown(struct grpc_server *server, unsigned grace_ms, void (*done)(void *user),
                          void *user);

struct grpc_server_stats {
    uint64_t connections, refused, calls, cancelled; /* since the start */
    unsigned open_connections, open_calls;
    size_t held; /* bytes, see max_held */
};
/* A copy, now. */
struct grpc_server_stats grpc_server_stats(const struct grpc_server *server);

/* grpc.health.v1, built in. Numbers are those of HealthCheckResponse.ServingStatus. */
enum grpc_health { GRPC_HEALTH_UNKNOWN = 0, GRPC_HEALTH_SERVING = 1, GRPC_HEALTH_NOT_SERVING = 2 };
/* `service` "" is the server as a whole, which begins as SERVING. Watchers are told of changes. */
int grpc_server_set_health(struct grpc_server *server, const char *service,
                           enum grpc_health health);

/*
 * Sends one response message, in this turn of the loop. Once for GRPC_UNARY.
 * -ECANCELED: the call is over, nobody listens. -ENOBUFS: the reader is too slow, this message
 * would overrun max_queued; the call ends with RESOURCE_EXHAUSTED. -EMSGSIZE: the message exceeds
 * max_message; the call goes on. -ENOMEM. In all four cases the call is still to be finished or its
 * cancel callback still to come.
 */
int grpc_call_send(struct grpc_call *call, const ProtobufCMessage *response);
/* Bytes that wait for the reader: a producer that can pause looks here before it sends more. */
size_t grpc_call_queued(const struct grpc_call *call);

/* Ends the call; queued messages still go out. `text` (may be NULL) tells a person what to do. */
void grpc_call_finish(struct grpc_call *call, enum grpc_status status, const char *text);
/* grpc_call_finish with the status and text of an error. */
void grpc_call_fail(struct grpc_call *call, const struct error *err);
/* grpc_call_send and grpc_call_finish(OK); a send that fails becomes the status. */
void grpc_call_reply(struct grpc_call *call, const ProtobufCMessage *response);

/* See "A call's life" above. NULL takes the callback away. */
void grpc_call_on_cancel(struct grpc_call *call, void (*cancelled)(struct grpc_call *, void *user),
                         void *user);

/* The peer's credentials when it connected. -ENOTSUP for TCP, -ECANCELED once it has gone. */
int grpc_call_peer(const struct grpc_call *call, struct ucred *ret_peer);
/* Value of a request header (lower-case name), or NULL. Of several, the first. */
const char *grpc_call_metadata(const struct grpc_call *call, const char *name);
/* Adds a trailer (lower-case name, printable value), at most 8. 0, -ENOSPC, -EINVAL. */
int grpc_call_add_trailer(struct grpc_call *call, const char *name, const char *value);

#endif
