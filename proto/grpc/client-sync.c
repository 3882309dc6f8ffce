/* SPDX-License-Identifier: Apache-2.0 */
/* The blocking half of the client: a private loop that runs until one call is over. */
#include <errno.h>
#include <string.h>

#include "proto/grpc/client-internal.h"

enum { INTERRUPT_POLL_MS = 50 };

struct wait {
    const struct grpc_client_stream *stream; /* NULL for a single response */
    size_t n_messages;
    ProtobufCMessage *response; /* a copy of the single one */
    bool done;
    struct grpc_client *client;
    struct grpc_client_call *call;
    struct error *err;
    enum grpc_status status;
};

/* The message goes when its callback returns; a single response is kept by packing it once more. */
static ProtobufCMessage *copy_of(const ProtobufCMessage *message)
{
    struct buffer bytes = {0};
    size_t size = protobuf_c_message_get_packed_size(message);
    ProtobufCMessage *copy = NULL;

    if (buffer_reserve(&bytes, size) == 0) {
        protobuf_c_message_pack(message, (uint8_t *)bytes.data);
        copy = protobuf_c_message_unpack(message->descriptor, NULL, size, (uint8_t *)bytes.data);
    }
    buffer_free(&bytes);
    return copy;
}

static void on_message(struct grpc_client_call *call, const ProtobufCMessage *response, void *user)
{
    struct wait *wait = user;

    wait->n_messages++;
    if (wait->stream) {
        if (wait->stream->message(response, wait->stream->user))
            grpc_client_cancel(call);
    } else if (!wait->response) {
        wait->response = copy_of(response);
    }
}

static void on_done(struct grpc_client_call *call, enum grpc_status status, const char *text,
                    void *user)
{
    struct wait *wait = user;

    wait->done = true;
    wait->status = status;
    if (status == GRPC_OK && !wait->stream && wait->n_messages != 1) {
        wait->status = GRPC_UNIMPLEMENTED;
        text = wait->n_messages ? "the server sent more than one response"
                                : "the server sent no response";
    } else if (status == GRPC_OK && !wait->stream && !wait->response) {
        wait->status = GRPC_RESOURCE_EXHAUSTED;
        text = "no memory for the response";
    }
    if (wait->status != GRPC_OK)
        error_set(wait->err, -grpc_status_to_error(wait->status), "%s",
                  *text ? text : grpc_status_name(wait->status));
}

static void on_poll(evutil_socket_t fd, short what, void *user)
{
    struct wait *wait = user;
    struct grpc_client *client = wait->client;

    if (!wait->done && client->interrupted(client->interrupted_user))
        grpc_client_cancel(wait->call);
}

static int run(struct grpc_client *client, const char *path, const ProtobufCMessage *request,
               const ProtobufCMessageDescriptor *response, uint64_t timeout_ms, struct wait *wait)
{
    static const struct grpc_client_callbacks callbacks = {on_message, on_done};
    struct timeval every = {.tv_usec = INTERRUPT_POLL_MS * 1000};
    struct event *poll = NULL;

    client->last_status = GRPC_UNAVAILABLE;
    if (!client->own_base)
        return error_set(wait->err, EINVAL, "a client on its caller's loop cannot block");
    int r = grpc_client_start(client, path, request, response, timeout_ms, &callbacks, wait,
                              &wait->call, wait->err);
    if (r < 0)
        return r;
    if (client->interrupted) {
        poll = event_new(client->base, -1, EV_PERSIST, on_poll, wait);
        if (poll)
            event_add(poll, &every);
    }
    while (!wait->done && event_base_loop(client->base, EVLOOP_ONCE) == 0)
        ;
    if (poll)
        event_free(poll);
    client->last_status = wait->status;
    return grpc_status_to_error(wait->status);
}

void grpc_client_on_interrupt(struct grpc_client *client, bool (*asked)(void *user), void *user)
{
    client->interrupted = asked;
    client->interrupted_user = user;
}

int grpc_client_call_sync(struct grpc_client *client, const char *path,
                          const ProtobufCMessage *request,
                          const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                          ProtobufCMessage **ret_response, struct error *err)
{
    struct wait wait = {.client = client, .err = err, .status = GRPC_UNKNOWN};

    int r = run(client, path, request, response, timeout_ms, &wait);
    if (r == 0)
        *ret_response = wait.response;
    else if (wait.response)
        protobuf_c_message_free_unpacked(wait.response, NULL);
    return r;
}

int grpc_client_stream_sync(struct grpc_client *client, const char *path,
                            const ProtobufCMessage *request,
                            const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                            const struct grpc_client_stream *stream, struct error *err)
{
    struct wait wait = {.client = client, .stream = stream, .err = err, .status = GRPC_UNKNOWN};

    return run(client, path, request, response, timeout_ms, &wait);
}
