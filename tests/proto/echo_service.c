/* SPDX-License-Identifier: Apache-2.0 */
#include "echo_service.h"

#include <errno.h>
#include <string.h>

#include "base/mem.h"

enum { PACED_QUEUE = 64 * 1024 };

extern const uint8_t echo_protoset[];
extern const size_t echo_protoset_size;

/* A call that answers later. */
struct pending {
    struct echo *echo;
    struct grpc_call *call;
    struct event *timer;
    const echo_request *request;
    uint32_t index;
};

static void pending_free(struct pending *p)
{
    p->echo->held--;
    if (p->timer)
        event_free(p->timer);
    free(p);
}

static void on_cancelled(struct grpc_call *call, void *user)
{
    struct pending *p = user;

    p->echo->cancelled++;
    pending_free(p);
}

static int send_one(struct grpc_call *call, const echo_request *request, uint32_t index)
{
    echo_response response = EMBER__TEST__ECHO_RESPONSE__INIT;
    const char *value = request->metadata[0] ? grpc_call_metadata(call, request->metadata) : NULL;
    _cleanup_free_ uint8_t *padding = mem_alloc(request->size + 1, 1);

    response.text = (char *)(value ? value : request->text);
    response.index = index;
    response.padding = (ProtobufCBinaryData){.len = padding ? request->size : 0, .data = padding};
    return grpc_call_send(call, &response.base);
}

static void answer(struct grpc_call *call, const echo_request *request)
{
    if (request->status) {
        grpc_call_add_trailer(call, "echo-trailer", "with the status");
        grpc_call_finish(call, (enum grpc_status)request->status, request->text);
        return;
    }
    int r = send_one(call, request, 0);
    grpc_call_add_trailer(call, "echo-trailer", "with the answer");
    grpc_call_finish(call, grpc_status_of_error(r), r ? "cannot send" : NULL);
}

static void on_answer_time(evutil_socket_t fd, short what, void *user)
{
    struct pending *p = user;

    answer(p->call, p->request);
    pending_free(p);
}

static struct pending *pending_new(struct echo *echo, struct grpc_call *call,
                                   const echo_request *request, event_callback_fn callback)
{
    struct pending *p = x_alloc(sizeof *p);
    struct timeval tv = {.tv_sec = request->delay_ms / 1000,
                         .tv_usec = (suseconds_t)(request->delay_ms % 1000) * 1000};

    *p = (struct pending){.echo = echo, .call = call, .request = request};
    echo->held++;
    grpc_call_on_cancel(call, on_cancelled, p);
    if (callback) {
        p->timer = evtimer_new(echo->base, callback, p);
        evtimer_add(p->timer, &tv);
    }
    return p;
}

static void on_echo(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const echo_request *request = (const echo_request *)message;
    struct echo *echo = user;

    echo->calls++;
    if (request->delay_ms)
        pending_new(echo, call, request, on_answer_time);
    else
        answer(call, request);
}

static void on_count_time(evutil_socket_t fd, short what, void *user)
{
    struct pending *p = user;
    const echo_request *request = p->request;
    struct timeval tv = {.tv_sec = request->delay_ms / 1000,
                         .tv_usec = (suseconds_t)(request->delay_ms % 1000) * 1000};

    while (p->index < request->count) {
        if (request->paced && grpc_call_queued(p->call) > PACED_QUEUE) {
            tv = (struct timeval){.tv_usec = 1000};
            break;
        }
        int r = send_one(p->call, request, p->index);
        if (r == -ENOBUFS)
            p->echo->overruns++;
        if (r < 0)
            return; /* the cancel callback cleans up */
        p->index++;
        if (request->delay_ms)
            break;
    }
    if (p->index < request->count) {
        evtimer_add(p->timer, &tv);
        return;
    }
    grpc_call_finish(p->call, (enum grpc_status)request->status,
                     request->status ? request->text : NULL);
    pending_free(p);
}

static void on_count(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    struct echo *echo = user;

    echo->calls++;
    struct pending *p = pending_new(echo, call, (const echo_request *)message, on_count_time);
    if (!p->request->delay_ms)
        event_active(p->timer, EV_TIMEOUT, 0);
}

static void on_chat(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const echo_request *request = (const echo_request *)message;

    if (!request || request->status)
        grpc_call_finish(call, request ? (enum grpc_status)request->status : GRPC_OK, "bye");
    else
        send_one(call, request, 0);
}

static void on_hang(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    pending_new(user, call, (const echo_request *)message, NULL);
}

static void on_stats(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    echo_response response = EMBER__TEST__ECHO_RESPONSE__INIT;
    struct echo *echo = user;

    response.cancelled = echo->cancelled;
    response.held = echo->held;
    grpc_call_reply(call, &response.base);
}

int echo_register(struct echo *echo, struct grpc_server *server, struct error *err)
{
    static const struct grpc_method methods[] = {
        {"Echo", GRPC_UNARY, on_echo},   {"Count", GRPC_SERVER_STREAM, on_count},
        {"Chat", GRPC_BIDI, on_chat},    {"Hang", GRPC_UNARY, on_hang},
        {"Stats", GRPC_UNARY, on_stats},
    };

    int r = grpc_server_add_service(server, &ember__test__echo__descriptor, methods,
                                    ARRAY_LEN(methods), echo, err);
    if (r == 0)
        r = grpc_server_add_protoset(server, echo_protoset, echo_protoset_size, err);
    if (r == 0)
        r = grpc_server_set_health(server, "ember.test.Echo", GRPC_HEALTH_SERVING);
    return r;
}
