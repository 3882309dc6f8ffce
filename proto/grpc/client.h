/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A gRPC client: calls with one request and one or many responses, over a Unix socket or plain TCP.
 *
 * Asynchronous use: the client lives on the caller's event loop; callbacks come from the loop,
 * never from inside a function of this header. Blocking use: a client made with a NULL base runs a
 * loop of its own inside the _sync functions.
 *
 * The connection is made at the first call and made again when it was lost, so a client outlives a
 * restart of its server; a call that was running then ends with UNAVAILABLE.
 */
#ifndef EMBER_PROTO_GRPC_CLIENT_H
#define EMBER_PROTO_GRPC_CLIENT_H

#include <event2/event.h>
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "proto/grpc/status.h"

struct grpc_client;
struct grpc_client_call;

#define GRPC_NO_TIMEOUT 0

/*
 * `target`: "unix:/path", "/path", or "host:port" ("[::1]:port"). Names other than numeric
 * addresses are resolved when connecting, which blocks. Nothing is connected yet. max_message:
 * longest response accepted, 0 for 4 MiB. -EINVAL for a target of no such form.
 */
int grpc_client_new(struct event_base *base, const char *target, size_t max_message,
                    struct grpc_client **ret_client, struct error *err);
/*
 * Running calls end without a callback. Not from inside a callback of this client.
 */
void grpc_client_free(struct grpc_client *client);

/*
 * Connects now unless connected, to learn early whether anybody listens. The codes of connect(2)
 * come through: -ENOENT (no such socket), -ECONNREFUSED (nobody listens), -EACCES. The answer of a
 * TCP peer comes later, with the first call.
 */
int grpc_client_connect(struct grpc_client *client, struct error *err);

struct grpc_client_callbacks {
    /* A response; valid until this returns. */
    void (*message)(struct grpc_client_call *call, const ProtobufCMessage *response, void *user);
    /* The end, exactly once; the call is gone when this returns. `text` is never NULL. */
    void (*done)(struct grpc_client_call *call, enum grpc_status status, const char *text,
                 void *user);
};

/*
 * Starts a call. `path` is "/package.Service/Method"; the response type's descriptor and the
 * callbacks (copied) are the caller's. timeout_ms is sent as the call's deadline and kept here as
 * well. Returns 0; or a negative errno as grpc_client_connect, -EMSGSIZE, -ENOMEM: no callback
 * comes then.
 */
int grpc_client_start(struct grpc_client *client, const char *path, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                      const struct grpc_client_callbacks *callbacks, void *user,
                      struct grpc_client_call **ret_call, struct error *err);
/* Resets the call; `done` follows with CANCELLED, and no more messages. */
void grpc_client_cancel(struct grpc_client_call *call);

/*
 * Blocking. Both return 0, or a negative errno: that of connecting, or the one that stands for the
 * call's status (grpc_status_to_error). *err has the server's text. grpc_client_last_status() tells
 * the exact status of the last blocking call, GRPC_UNAVAILABLE when it could not be started.
 */

/*
 * `interrupted` is asked every 50 ms and after each signal while a call blocks; true cancels it:
 * -ECANCELED. NULL: nobody is asked.
 */
void grpc_client_on_interrupt(struct grpc_client *client, bool (*interrupted)(void *user),
                              void *user);

/* *ret_response is the caller's: protobuf_c_message_free_unpacked(response, NULL). */
int grpc_client_call_sync(struct grpc_client *client, const char *path,
                          const ProtobufCMessage *request,
                          const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                          ProtobufCMessage **ret_response, struct error *err);

struct grpc_client_stream {
    /* Each response, valid until this returns; non-zero cancels the call: -ECANCELED. */
    int (*message)(const ProtobufCMessage *response, void *user);
    void *user;
};
int grpc_client_stream_sync(struct grpc_client *client, const char *path,
                            const ProtobufCMessage *request,
                            const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                            const struct grpc_client_stream *stream, struct error *err);

enum grpc_status grpc_client_last_status(const struct grpc_client *client);

#endif
