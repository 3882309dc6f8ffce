/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/control.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/value.h"
#include "cli/output.h"
#include "proto/grpc/client.h"

#define MESSAGE_MAX (64 * MIB)

struct control {
    char *socket;
    struct grpc_client *client;
};

static bool interrupted(void *user)
{
    return cli_interrupted;
}

int control_open_socket(const char *socket, struct control **ret, struct error *err)
{
    struct control *control = x_alloc(sizeof *control);

    control->socket = x_strdup(socket);
    int r = grpc_client_new(NULL, socket, MESSAGE_MAX, &control->client, err);
    if (r < 0) {
        control_free(control);
        return r;
    }
    grpc_client_on_interrupt(control->client, interrupted, NULL);
    *ret = control;
    return 0;
}

#define START_MS 500                            /* a daemon that was started just now */
#define SYSTEM_SOCKET "/run/emberd/emberd.sock" /* of the one that the system runs */

/* Where emberd of this user is, unless there is none but the system's. */
static int default_socket(char **ret, struct error *err)
{
    int r = value_expand("%t/emberd/emberd.sock", ret, err); /* as emberd does */

    if (r == 0 && access(*ret, F_OK) < 0 && access(SYSTEM_SOCKET, F_OK) == 0) {
        free(*ret);
        *ret = x_strdup(SYSTEM_SOCKET);
    }
    return r;
}

/* `emberd & emberctl ...`: the socket may be a moment away. What it ends with, the call will say.
 */
static void await(struct control *control)
{
    uint64_t started = clock_ns();
    struct error err;
    int r;

    while ((r = grpc_client_connect(control->client, &err)) == -ENOENT || r == -ECONNREFUSED) {
        if (clock_ms_since(started) > START_MS || cli_interrupted)
            return;
        usleep(5000);
    }
}

int control_open(const struct verb_call *call, struct control **ret, struct error *err)
{
    _cleanup_free_ char *fallback = NULL;
    const char *socket = verb_string(call, "socket");

    if (!socket)
        socket = getenv("EMBER_SOCKET");
    int r = socket ? 0 : default_socket(&fallback, err);
    if (r == 0)
        r = control_open_socket(socket ? socket : fallback, ret, err);
    if (r == 0)
        await(*ret);
    return r;
}

void control_free(struct control *control)
{
    if (!control)
        return;
    grpc_client_free(control->client);
    free(control->socket);
    free(control);
}

/* Whether it was the daemon that could not be reached, and then what to do. */
static int explain(struct control *control, int r, struct error *err)
{
    if (r != -ECONNREFUSED && r != -ENOENT && r != -EACCES)
        return r;
    struct error connecting = {0};
    int connected = grpc_client_connect(control->client, &connecting);
    if (connected == -EACCES)
        return error_set(err, EACCES,
                         "%s: not allowed; emberd serves its own user, its group and root (usermod "
                         "-aG emberd USER, for the one that the system runs)",
                         control->socket);
    if (connected < 0)
        return error_set(
            err, ECONNREFUSED,
            "no emberd at %s; start it with: emberd & (or name its socket with --socket)",
            control->socket);
    return r;
}

static char *path_of(const char *method)
{
    return x_printf("/ember.v1.Ember/%s", method);
}

int control_call(struct control *control, const char *method, const ProtobufCMessage *request,
                 const ProtobufCMessageDescriptor *response, int timeout_ms, void *ret,
                 struct error *err)
{
    _cleanup_free_ char *path = path_of(method);
    ProtobufCMessage *message;

    int r = grpc_client_call_sync(control->client, path, request, response, (uint64_t)timeout_ms,
                                  &message, err);
    if (r < 0)
        return explain(control, r, err);
    *(ProtobufCMessage **)ret = message;
    return 0;
}

struct stream {
    int (*each)(void *ctx, const ProtobufCMessage *message);
    void *ctx;
    bool ended; /* by `each` */
};

static int on_message(const ProtobufCMessage *message, void *user)
{
    struct stream *stream = user;

    stream->ended = stream->each(stream->ctx, message) != 0;
    return stream->ended;
}

int control_stream(struct control *control, const char *method, const ProtobufCMessage *request,
                   const ProtobufCMessageDescriptor *response,
                   int (*each)(void *ctx, const ProtobufCMessage *message), void *ctx,
                   struct error *err)
{
    _cleanup_free_ char *path = path_of(method);
    struct stream stream = {.each = each, .ctx = ctx};
    struct grpc_client_stream callbacks = {.message = on_message, .user = &stream};

    int r = grpc_client_stream_sync(control->client, path, request, response, GRPC_NO_TIMEOUT,
                                    &callbacks, err);
    if (r == -ECANCELED && (stream.ended || cli_interrupted))
        return 0;
    return r < 0 ? explain(control, r, err) : 0;
}

int control_spawn(struct control *control, const char *model, int timeout_ms,
                  Ember__V1__SpawnInstanceResponse **ret, struct error *err)
{
    Ember__V1__SpawnInstanceRequest request = EMBER__V1__SPAWN_INSTANCE_REQUEST__INIT;

    request.model = (char *)(model ? model : "");
    request.holder = "emberctl";
    return control_call(control, "SpawnInstance", &request.base,
                        &ember__v1__spawn_instance_response__descriptor, timeout_ms, ret, err);
}

void control_release(struct control *control, const char *id, bool keep_warm)
{
    Ember__V1__StopInstanceRequest request = EMBER__V1__STOP_INSTANCE_REQUEST__INIT;
    Ember__V1__StopInstanceResponse *response = NULL;

    request.id = (char *)id;
    request.keep_warm = keep_warm;
    grpc_client_on_interrupt(control->client, NULL, NULL); /* most of all then */
    if (control_call(control, "StopInstance", &request.base,
                     &ember__v1__stop_instance_response__descriptor, 10000, &response, NULL) == 0)
        protobuf_c_message_free_unpacked(&response->base, NULL);
    grpc_client_on_interrupt(control->client, interrupted, NULL);
}
