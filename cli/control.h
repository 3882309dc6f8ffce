/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl's calls of ember.v1.Ember: where the daemon is, and errors that say what to do. */
#ifndef EMBER_CLI_CONTROL_H
#define EMBER_CLI_CONTROL_H

#include <protobuf-c/protobuf-c.h>

#include "base/error.h"
#include "base/verbs.h"
#include "ember/v1/ember.pb-c.h"

struct control;

/*
 * To the socket of --socket, else EMBER_SOCKET, else where emberd of this user puts it, else the
 * system's. Waits for half a second when nobody listens there (a daemon that is starting); the
 * first call then says so.
 */
int control_open(const struct verb_call *call, struct control **ret, struct error *err);
/* The same to a given socket. */
int control_open_socket(const char *socket, struct control **ret, struct error *err);
void control_free(struct control *control);
DEFINE_CLEANUP(struct control *, control_free)

/*
 * One unary call; `method` is "SpawnInstance". The caller frees *ret with
 * protobuf_c_message_free_unpacked. -ECONNREFUSED: no daemon there; -ECANCELED: interrupted; other
 * errors carry the daemon's text.
 */
int control_call(struct control *control, const char *method, const ProtobufCMessage *request,
                 const ProtobufCMessageDescriptor *response, int timeout_ms, void *ret,
                 struct error *err);

/* A server stream: each message goes to `each`, which returns non-zero to end it. Ends with 0 on
 * interrupt as well. */
int control_stream(struct control *control, const char *method, const ProtobufCMessage *request,
                   const ProtobufCMessageDescriptor *response,
                   int (*each)(void *ctx, const ProtobufCMessage *message), void *ctx,
                   struct error *err);

/* Spawns an instance of `model` ("" or NULL: the default) for this process. */
int control_spawn(struct control *control, const char *model, int timeout_ms,
                  Ember__V1__SpawnInstanceResponse **ret, struct error *err);
/* Gives an instance back to the pool (keep_warm) or stops it; a failure is not worth telling
 * anyone. */
void control_release(struct control *control, const char *id, bool keep_warm);

#endif
