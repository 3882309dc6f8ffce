/* SPDX-License-Identifier: Apache-2.0 */
/* A call of the server: its request, its handler, its responses, its end. */
#include "proto/grpc/server-internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/utf8.h"

enum { COMPACT_SIZE = 64 * 1024, HEADERS_OUT_MAX = 4 + TRAILERS_MAX };

static void drop_queue(struct grpc_call *call)
{
    server_release(call, call->out.len - call->out_pos);
    buffer_free(&call->out);
    call->out_pos = 0;
}

static void drop_reader(struct grpc_call *call)
{
    server_release(call, call->reader_held);
    call->reader_held = 0;
    grpc_frame_reader_free(&call->reader);
}

static void drop_deadline(struct grpc_call *call)
{
    if (call->deadline_event)
        event_free(call->deadline_event);
    call->deadline_event = NULL;
}

void call_unref(struct grpc_call *call)
{
    if (--call->refs)
        return;
    drop_queue(call);
    drop_reader(call);
    drop_deadline(call);
    if (call->request)
        protobuf_c_message_free_unpacked(call->request, NULL);
    server_release(call, call->held);
    buffer_free(&call->headers);
    buffer_free(&call->trailers);
    free(call->status_text);
    if (!call->conn && call->server)
        LIST_REMOVE(call, link); /* of the orphans */
    free(call);
}

struct grpc_call *call_new(struct server_conn *conn, int32_t stream_id)
{
    struct grpc_call *call = mem_alloc(1, sizeof *call);

    if (!call)
        return NULL;
    call->server = conn->server;
    call->conn = conn;
    call->stream_id = stream_id;
    call->refs = 1;
    call->reader.max = conn->server->options.max_message;
    LIST_INSERT_HEAD(&conn->calls, call, link);
    conn->server->stats.calls++;
    conn->server->stats.open_calls++;
    return call;
}

/* Request headers. */

int call_header(struct grpc_call *call, const char *name, size_t name_len, const char *value,
                size_t value_len)
{
    call->header_list += name_len + value_len + 32;
    if (call->header_list > HEADER_LIST_MAX)
        return -EMSGSIZE;
    /* buffer_append keeps a NUL behind the data; taking it in ends the string. */
    if (buffer_append(&call->headers, name, name_len) < 0 ||
        buffer_append(&call->headers, "", 1) < 0 ||
        buffer_append(&call->headers, value, value_len) < 0 ||
        buffer_append(&call->headers, "", 1) < 0)
        return -ENOMEM;
    return 0;
}

const char *grpc_call_metadata(const struct grpc_call *call, const char *name)
{
    const char *p = call->headers.data, *end = p + call->headers.len;

    while (p < end) {
        const char *value = p + strlen(p) + 1;
        if (!strcmp(p, name))
            return value;
        p = value + strlen(value) + 1;
    }
    return NULL;
}

/* Response headers, data, trailers. */

static unsigned add_trailers(const struct grpc_call *call, nghttp2_nv *nv, unsigned n,
                             char number[12], char *text, size_t room)
{
    snprintf(number, 12, "%d", (int)call->status);
    nv[n++] = h2_header("grpc-status", number);
    if (call->status_text && *call->status_text) {
        grpc_message_encode(call->status_text, text, room);
        nv[n++] = h2_header("grpc-message", text);
    }
    const char *p = call->trailers.data;
    while (p && p < call->trailers.data + call->trailers.len) {
        const char *value = p + strlen(p) + 1;
        nv[n++] = h2_header(p, value);
        p = value + strlen(value) + 1;
    }
    return n;
}

/* With `only`, the whole answer in one HEADERS frame. */
static void submit_trailers(struct grpc_call *call, bool only)
{
    nghttp2_session *session = call->conn->h2.session;
    nghttp2_nv nv[HEADERS_OUT_MAX];
    char number[12], text[STATUS_TEXT_MAX * 3 + 1];
    unsigned n = 0;

    if (only) {
        nv[n++] = h2_header(":status", "200");
        nv[n++] = h2_header("content-type", "application/grpc");
    }
    n = add_trailers(call, nv, n, number, text, sizeof text);
    int r = only ? nghttp2_submit_response(session, call->stream_id, nv, n, NULL)
                 : nghttp2_submit_trailer(session, call->stream_id, nv, n);
    if (r)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, call->stream_id,
                                  NGHTTP2_INTERNAL_ERROR);
    call->answered = call->trailed = true;
    drop_deadline(call);
}

static ssize_t read_queue(nghttp2_session *session, int32_t stream_id, uint8_t *to, size_t room,
                          uint32_t *flags, nghttp2_data_source *source, void *user)
{
    struct grpc_call *call = source->ptr;
    size_t n = MIN(room, call->out.len - call->out_pos);

    if (n)
        memcpy(to, call->out.data + call->out_pos, n);
    call->out_pos += n;
    server_release(call, n);
    if (call->out_pos < call->out.len)
        return (ssize_t)n;
    call->out.len = call->out_pos = 0;
    if (call->out.cap > COMPACT_SIZE)
        buffer_free(&call->out);
    if (call->finished) {
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        if (!call->trailed)
            submit_trailers(call, false);
        return (ssize_t)n;
    }
    if (!n) {
        call->deferred = true;
        return NGHTTP2_ERR_DEFERRED;
    }
    return (ssize_t)n;
}

/* Lets nghttp2 know that the queue or the state has changed. */
static void push(struct grpc_call *call)
{
    nghttp2_session *session = call->conn->h2.session;

    if (!call->answered) {
        nghttp2_nv nv[] = {h2_header(":status", "200"),
                           h2_header("content-type", "application/grpc")};
        nghttp2_data_provider provider = {.source.ptr = call, .read_callback = read_queue};
        call->answered = true;
        if (nghttp2_submit_response(session, call->stream_id, nv, ARRAY_LEN(nv), &provider))
            nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, call->stream_id,
                                      NGHTTP2_INTERNAL_ERROR);
    } else if (call->deferred) {
        call->deferred = false;
        nghttp2_session_resume_data(session, call->stream_id);
    }
    h2_wake(&call->conn->h2);
}

/* Ending. */

static void set_status(struct grpc_call *call, enum grpc_status status, const char *text)
{
    call->finished = true;
    call->status = status;
    if (text && *text)
        call->status_text = x_strndup(text, STATUS_TEXT_MAX - 1);
}

static void schedule_cancel(struct grpc_call *call)
{
    if (call->cancel_queued)
        return;
    call->cancel_queued = true;
    TAILQ_INSERT_TAIL(&call->server->cancels, call, cancel_link);
    event_active(call->server->cancel_event, EV_TIMEOUT, 0);
}

static void mark_cancelled(struct grpc_call *call)
{
    if (!call->app_owned || call->cancelled)
        return;
    call->cancelled = true;
    call->server->stats.cancelled++;
    schedule_cancel(call);
}

static void drop_app_ref(struct grpc_call *call)
{
    if (call->cancel_queued)
        TAILQ_REMOVE(&call->server->cancels, call, cancel_link);
    call->cancel_queued = false;
    call->on_cancel = NULL;
    if (call->app_owned) {
        call->app_owned = false;
        call_unref(call);
    }
}

void server_run_cancels(struct grpc_server *server)
{
    while (!TAILQ_EMPTY(&server->cancels)) {
        struct grpc_call *call = TAILQ_FIRST(&server->cancels);
        TAILQ_REMOVE(&server->cancels, call, cancel_link);
        call->cancel_queued = false;
        if (!call->on_cancel && call->kind != GRPC_BIDI)
            continue; /* stays until grpc_call_finish */
        call->refs++;
        if (call->on_cancel)
            call->on_cancel(call, call->on_cancel_user);
        drop_app_ref(call);
        call_unref(call);
    }
}

void call_abort(struct grpc_call *call, enum grpc_status status, const char *text)
{
    if (call->trailed || !call->conn)
        return;
    if (!call->finished)
        set_status(call, status, text);
    else if (status != call->status) { /* finished, but its queue never left */
        free(call->status_text);
        call->status_text = NULL;
        set_status(call, status, text);
    }
    drop_queue(call);
    drop_reader(call);
    submit_trailers(call, !call->answered);
    h2_wake(&call->conn->h2);
    mark_cancelled(call);
}

void call_stream_closed(struct grpc_call *call)
{
    LIST_REMOVE(call, link);
    LIST_INSERT_HEAD(&call->server->orphans, call, link);
    call->server->stats.open_calls--;
    call->conn = NULL;
    drop_deadline(call);
    drop_queue(call);
    drop_reader(call);
    mark_cancelled(call);
    call->finished = true;
    call_unref(call);
}

static void on_deadline(evutil_socket_t fd, short what, void *user)
{
    struct grpc_call *call = user;

    call_abort(call, GRPC_DEADLINE_EXCEEDED, "the deadline has passed");
}

/* The request. */

static void answer_http(struct grpc_call *call, const char *status)
{
    nghttp2_nv nv[] = {h2_header(":status", status)};

    nghttp2_submit_response(call->conn->h2.session, call->stream_id, nv, ARRAY_LEN(nv), NULL);
    call->finished = call->answered = call->trailed = true;
}

static bool is_grpc(const char *type)
{
    static const char *const accepted[] = {"application/grpc", "application/grpc+proto"};

    for (size_t i = 0; type && i < ARRAY_LEN(accepted); i++) {
        size_t n = strlen(accepted[i]);
        if (!strncmp(type, accepted[i], n) && (!type[n] || type[n] == ';'))
            return true;
    }
    return false;
}

static void start_deadline(struct grpc_call *call, const char *timeout)
{
    uint64_t ns;

    if (grpc_timeout_parse(timeout, strlen(timeout), &ns) < 0) {
        call_abort(call, GRPC_INVALID_ARGUMENT, "grpc-timeout is malformed");
        return;
    }
    if (!size_add(clock_ns(), ns, &call->deadline_ns) || ns > UINT64_C(1000000000) * INT32_MAX)
        return; /* further away than a timer can be */
    struct timeval tv = {.tv_sec = (time_t)(ns / 1000000000),
                         .tv_usec = (suseconds_t)(ns % 1000000000 / 1000)};
    call->deadline_event = evtimer_new(call->server->base, on_deadline, call);
    if (ns == 0)
        on_deadline(-1, 0, call);
    else if (!call->deadline_event || evtimer_add(call->deadline_event, &tv) < 0)
        call_abort(call, GRPC_RESOURCE_EXHAUSTED, "out of memory");
}

void call_begin(struct grpc_call *call)
{
    const char *path = grpc_call_metadata(call, ":path");
    const char *verb = grpc_call_metadata(call, ":method");
    const char *timeout = grpc_call_metadata(call, "grpc-timeout");
    unsigned index;

    if (call->finished)
        return;
    if (!verb || strcmp(verb, "POST")) {
        answer_http(call, "405");
        return;
    }
    if (!is_grpc(grpc_call_metadata(call, "content-type"))) {
        answer_http(call, "415");
        return;
    }
    call->service = server_find(call->server, path ? path : "", &call->method, &index);
    if (!call->service) {
        char text[STATUS_TEXT_MAX];
        snprintf(text, sizeof text, "there is no method %.400s here", path ? path : "");
        call_abort(call, GRPC_UNIMPLEMENTED, text);
        return;
    }
    call->kind = call->service->methods[index].kind;
    call->handler = call->service->methods[index].handler;
    if (timeout)
        start_deadline(call, timeout);
}

static void run_handler(struct grpc_call *call, const ProtobufCMessage *request)
{
    call->refs++;
    if (!call->app_owned) {
        call->app_owned = true;
        call->refs++;
    }
    call->handler(call, request, call->service->user);
    call_unref(call);
}

static void refuse_compressed(struct grpc_call *call)
{
    const char *encoding = grpc_call_metadata(call, "grpc-encoding");

    if (!encoding || !strcmp(encoding, "identity")) {
        call_abort(call, GRPC_INTERNAL, "a compressed message, but grpc-encoding names no method");
        return;
    }
    grpc_call_add_trailer(call, "grpc-accept-encoding", "identity");
    call_abort(call, GRPC_UNIMPLEMENTED, "compressed messages are not understood, send identity");
}

/*
 * proto3: strings are UTF-8. protobuf-c takes any bytes; sent back in a list they would make other
 * clients' parsers refuse the list. The name of the first field that is not; NULL when all are.
 * Recursion ends: grpc_server_add_service takes no request type that contains itself.
 */
static const char *bad_string(const ProtobufCMessage *message)
{
    const ProtobufCMessageDescriptor *desc = message->descriptor;

    for (unsigned i = 0; i < desc->n_fields; i++) {
        const ProtobufCFieldDescriptor *f = &desc->fields[i];
        const char *member = (const char *)message + f->offset;
        const char *quantifier = (const char *)message + f->quantifier_offset;
        bool is_message = f->type == PROTOBUF_C_TYPE_MESSAGE;
        size_t n = f->label == PROTOBUF_C_LABEL_REPEATED ? *(const size_t *)quantifier : 1;
        if ((f->type != PROTOBUF_C_TYPE_STRING && !is_message) ||
            ((f->flags & PROTOBUF_C_FIELD_FLAG_ONEOF) && *(const uint32_t *)quantifier != f->id))
            continue;
        const void *const *items = f->label == PROTOBUF_C_LABEL_REPEATED
                                       ? *(const void *const *const *)member
                                       : (const void *const *)member;
        for (size_t k = 0; k < n; k++) {
            const char *bad = !items[k]              ? NULL
                              : is_message           ? bad_string(items[k])
                              : utf8_valid(items[k]) ? NULL
                                                     : f->name;
            if (bad)
                return bad;
        }
    }
    return NULL;
}

static int on_message(bool compressed, const uint8_t *data, size_t len, void *user)
{
    struct grpc_call *call = user;

    if (compressed) {
        refuse_compressed(call);
        return 1;
    }
    if (call->request) {
        call_abort(call, GRPC_UNIMPLEMENTED, "more than one request message");
        return 1;
    }
    ProtobufCMessage *request = protobuf_c_message_unpack(call->method->input, NULL, len, data);
    if (!request) {
        char text[STATUS_TEXT_MAX];
        snprintf(text, sizeof text, "the request does not parse as %s", call->method->input->name);
        call_abort(call, GRPC_INTERNAL, text);
        return 1;
    }
    const char *bad = bad_string(request);
    if (bad) {
        char text[STATUS_TEXT_MAX];
        snprintf(text, sizeof text, "the field %s of %s is not UTF-8", bad,
                 call->method->input->name);
        protobuf_c_message_free_unpacked(request, NULL);
        call_abort(call, GRPC_INVALID_ARGUMENT, text);
        return 1;
    }
    if (call->kind != GRPC_BIDI) {
        call->request = request;
        if (!server_hold(call, len)) {
            call_abort(call, GRPC_RESOURCE_EXHAUSTED, "the server holds too many requests");
            return 1;
        }
        return 0;
    }
    run_handler(call, request);
    protobuf_c_message_free_unpacked(request, NULL);
    return call->finished;
}

static void refuse_data(struct grpc_call *call, int code)
{
    char text[STATUS_TEXT_MAX];

    if (code == -EMSGSIZE) {
        snprintf(text, sizeof text, "the message is longer than the limit of %zu bytes",
                 call->server->options.max_message);
        call_abort(call, GRPC_RESOURCE_EXHAUSTED, text);
    } else if (code == -EBADMSG) {
        call_abort(call, GRPC_INTERNAL, "bad message framing: the flag byte is neither 0 nor 1");
    } else {
        call_abort(call, GRPC_RESOURCE_EXHAUSTED, "out of memory");
    }
}

void call_data(struct grpc_call *call, const uint8_t *data, size_t n)
{
    if (call->finished || !call->method)
        return;
    call->refs++;
    int r = grpc_frame_feed(&call->reader, data, n, on_message, call);
    server_release(call, call->reader_held);
    call->reader_held = 0;
    if (r < 0 && !call->finished)
        refuse_data(call, r);
    else if (!call->finished && !server_hold(call, call->reader.body.len))
        call_abort(call, GRPC_RESOURCE_EXHAUSTED, "the server holds too many requests");
    else
        call->reader_held = call->finished ? 0 : call->reader.body.len;
    if (call->finished)
        drop_reader(call);
    call_unref(call);
}

void call_request_done(struct grpc_call *call)
{
    call->request_done = true;
    if (call->finished || !call->method)
        return;
    if (grpc_frame_midway(&call->reader)) {
        call_abort(call, GRPC_INTERNAL, "the request ends inside a message");
        return;
    }
    if (call->kind != GRPC_BIDI && !call->request) {
        call_abort(call, GRPC_UNIMPLEMENTED, "a request message is missing");
        return;
    }
    run_handler(call, call->request);
}

/* What handlers call. */

size_t grpc_call_queued(const struct grpc_call *call)
{
    return call->out.len - call->out_pos;
}

static void compact(struct grpc_call *call)
{
    if (call->out_pos < COMPACT_SIZE || call->out_pos < call->out.len / 2)
        return;
    call->out.len -= call->out_pos;
    memmove(call->out.data, call->out.data + call->out_pos, call->out.len);
    call->out_pos = 0;
}

int grpc_call_send(struct grpc_call *call, const ProtobufCMessage *response)
{
    size_t queued = grpc_call_queued(call);

    if (call->finished || !call->conn)
        return -ECANCELED;
    const struct grpc_server_options *options = &call->server->options;
    compact(call);
    size_t before = call->out.len;
    int r = grpc_frame_append(&call->out, response, options->max_message);
    if (r < 0)
        return r;
    size_t added = call->out.len - before;
    bool overrun = queued && queued + added > options->max_queued;
    if (overrun || !server_hold(call, added)) {
        call->out.len = before;
        call_abort(call, GRPC_RESOURCE_EXHAUSTED,
                   overrun ? "the client reads too slowly: its queue is full"
                           : "the server holds too many responses");
        return -ENOBUFS;
    }
    push(call);
    return 0;
}

void grpc_call_finish(struct grpc_call *call, enum grpc_status status, const char *text)
{
    if (!call->finished && call->conn) {
        set_status(call, status, text);
        if (!call->answered)
            submit_trailers(call, true);
        push(call);
    }
    drop_app_ref(call);
}

void grpc_call_fail(struct grpc_call *call, const struct error *err)
{
    enum grpc_status status = grpc_status_of_error(err->code);

    grpc_call_finish(call, status == GRPC_OK ? GRPC_INTERNAL : status, error_text(err));
}

void grpc_call_reply(struct grpc_call *call, const ProtobufCMessage *response)
{
    int r = grpc_call_send(call, response);
    char text[STATUS_TEXT_MAX];

    if (r == 0) {
        grpc_call_finish(call, GRPC_OK, NULL);
        return;
    }
    snprintf(text, sizeof text, "the response cannot be sent: %s", strerror(-r));
    grpc_call_finish(call, grpc_status_of_error(r), text);
}

void grpc_call_on_cancel(struct grpc_call *call, void (*cancelled)(struct grpc_call *, void *user),
                         void *user)
{
    call->on_cancel = cancelled;
    call->on_cancel_user = user;
    if (cancelled && call->cancelled && call->app_owned && call->server)
        schedule_cancel(call);
}

int grpc_call_peer(const struct grpc_call *call, struct ucred *ret_peer)
{
    if (!call->conn)
        return -ECANCELED;
    if (!call->conn->has_peer)
        return -ENOTSUP;
    *ret_peer = call->conn->peer;
    return 0;
}

int grpc_call_add_trailer(struct grpc_call *call, const char *name, const char *value)
{
    if (call->n_trailers == TRAILERS_MAX)
        return -ENOSPC;
    if (!nghttp2_check_header_name((const uint8_t *)name, strlen(name)) || name[0] == ':' ||
        !nghttp2_check_header_value((const uint8_t *)value, strlen(value)))
        return -EINVAL;
    int r = buffer_reserve(&call->trailers, strlen(name) + strlen(value) + 2);
    if (r < 0)
        return r;
    buffer_append(&call->trailers, name, strlen(name) + 1);
    buffer_append(&call->trailers, value, strlen(value) + 1);
    call->n_trailers++;
    return 0;
}
