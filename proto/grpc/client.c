/* SPDX-License-Identifier: Apache-2.0 */
#include "proto/grpc/client.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/fd.h"
#include "proto/grpc/client-internal.h"

enum { STREAM_WINDOW = 1024 * 1024, CONNECTION_WINDOW = 8 * 1024 * 1024 };

/* Ending calls. */

static void call_free(struct grpc_client_call *call)
{
    if (call->deadline_event)
        event_free(call->deadline_event);
    buffer_free(&call->out);
    grpc_frame_reader_free(&call->reader);
    free(call);
}

static void set_status(struct grpc_client_call *call, enum grpc_status status, const char *text)
{
    if (call->has_status)
        return;
    call->has_status = true;
    call->status = status;
    snprintf(call->text, sizeof call->text, "%s", text);
}

/* Moves the call to the list from which the loop calls `done`. Its stream may live on, unheard. */
static void end_call(struct grpc_client_call *call)
{
    if (call->ended)
        return;
    call->ended = true;
    if (call->stream_id && call->conn)
        nghttp2_session_set_stream_user_data(call->conn->h2.session, call->stream_id, NULL);
    call->stream_id = 0;
    call->conn = NULL;
    LIST_REMOVE(call, link);
    if (call->deadline_event)
        event_del(call->deadline_event);
    TAILQ_INSERT_TAIL(&call->client->ended, call, ended_link);
    event_active(call->client->ended_event, EV_TIMEOUT, 0);
}

/* Ends a call that is not over for the server. */
static void reset_call(struct grpc_client_call *call, enum grpc_status status, const char *text)
{
    struct client_conn *conn = call->conn;

    if (call->ended)
        return;
    set_status(call, status, text);
    nghttp2_submit_rst_stream(conn->h2.session, NGHTTP2_FLAG_NONE, call->stream_id, NGHTTP2_CANCEL);
    h2_wake(&conn->h2);
    end_call(call);
}

static void on_ended(evutil_socket_t fd, short what, void *user)
{
    struct grpc_client *client = user;

    while (!TAILQ_EMPTY(&client->ended)) {
        struct grpc_client_call *call = TAILQ_FIRST(&client->ended);
        TAILQ_REMOVE(&client->ended, call, ended_link);
        call->callbacks.done(call, call->status, call->text, call->user);
        call_free(call);
    }
}

static void on_deadline(evutil_socket_t fd, short what, void *user)
{
    reset_call(user, GRPC_DEADLINE_EXCEEDED, "the deadline has passed");
}

void grpc_client_cancel(struct grpc_client_call *call)
{
    reset_call(call, GRPC_CANCELLED, "cancelled by the caller");
}

/* Responses. */

static struct grpc_client_call *call_of(nghttp2_session *session, int32_t stream_id)
{
    return nghttp2_session_get_stream_user_data(session, stream_id);
}

static int number_of(const uint8_t *value, size_t len)
{
    int n = 0;

    if (!len || len > 6)
        return -1;
    for (size_t i = 0; i < len; i++) {
        if (value[i] < '0' || value[i] > '9')
            return -1;
        n = n * 10 + (value[i] - '0');
    }
    return n;
}

static bool is(const char *want, const uint8_t *name, size_t len)
{
    return strlen(want) == len && !memcmp(want, name, len);
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_len, const uint8_t *value, size_t value_len, uint8_t flags,
                     void *user)
{
    struct grpc_client_call *call = call_of(session, frame->hd.stream_id);

    if (!call)
        return 0;
    if (is(":status", name, name_len)) {
        call->http_status = number_of(value, value_len);
    } else if (is("content-type", name, name_len)) {
        call->is_grpc = value_len >= 16 && !memcmp(value, "application/grpc", 16);
    } else if (is("grpc-status", name, name_len) && !call->has_status) {
        int status = number_of(value, value_len);
        call->has_status = true;
        call->status =
            status < 0 || status > GRPC_UNAUTHENTICATED ? GRPC_UNKNOWN : (enum grpc_status)status;
    } else if (is("grpc-message", name, name_len)) {
        grpc_message_decode((const char *)value, value_len, call->text, sizeof call->text);
    }
    return 0;
}

static int on_message(bool compressed, const uint8_t *data, size_t len, void *user)
{
    struct grpc_client_call *call = user;

    if (compressed) {
        reset_call(call, GRPC_INTERNAL, "the server sent a compressed message unasked");
        return 1;
    }
    ProtobufCMessage *response = protobuf_c_message_unpack(call->response, NULL, len, data);
    if (!response) {
        reset_call(call, GRPC_INTERNAL, "the response does not parse");
        return 1;
    }
    call->callbacks.message(call, response, call->user);
    protobuf_c_message_free_unpacked(response, NULL);
    return call->ended;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream_id, const uint8_t *data,
                   size_t n, void *user)
{
    struct grpc_client_call *call = call_of(session, stream_id);

    if (!call || call->http_status != 200 || !call->is_grpc)
        return 0; /* a proxy's page, say: the status tells */
    int r = grpc_frame_feed(&call->reader, data, n, on_message, call);
    if (r == -EMSGSIZE)
        reset_call(call, GRPC_RESOURCE_EXHAUSTED, "the response is longer than the limit");
    else if (r == -ENOMEM)
        reset_call(call, GRPC_RESOURCE_EXHAUSTED, "no memory for the response");
    else if (r < 0)
        reset_call(call, GRPC_INTERNAL, "the response's message framing is damaged");
    return 0;
}

static enum grpc_status status_of_reset(uint32_t code)
{
    switch (code) {
    case NGHTTP2_REFUSED_STREAM:
        return GRPC_UNAVAILABLE;
    case NGHTTP2_CANCEL:
        return GRPC_CANCELLED;
    case NGHTTP2_ENHANCE_YOUR_CALM:
        return GRPC_RESOURCE_EXHAUSTED;
    case NGHTTP2_INADEQUATE_SECURITY:
        return GRPC_PERMISSION_DENIED;
    default:
        return GRPC_INTERNAL;
    }
}

/* The stream is over; finds the status when the server gave none. */
static int on_stream_close(nghttp2_session *session, int32_t stream_id, uint32_t code, void *user)
{
    struct grpc_client_call *call = call_of(session, stream_id);
    char text[CLIENT_TEXT_MAX];

    if (!call)
        return 0;
    if (!call->has_status && call->http_status > 0 && call->http_status != 200) {
        snprintf(text, sizeof text, "the server answered HTTP %d", call->http_status);
        set_status(call, grpc_status_of_http(call->http_status), text);
    } else if (!call->has_status) {
        snprintf(text, sizeof text, "the stream ended without a status: %s",
                 nghttp2_http2_strerror(code));
        set_status(call, status_of_reset(code), text);
    } else if (call->status == GRPC_OK && grpc_frame_midway(&call->reader)) {
        call->has_status = false;
        set_status(call, GRPC_INTERNAL, "the response ends inside a message");
    }
    end_call(call);
    return 0;
}

static int on_frame_recv(nghttp2_session *session, const nghttp2_frame *frame, void *user)
{
    struct client_conn *conn = user;

    if (frame->hd.type != NGHTTP2_GOAWAY)
        return 0;
    conn->draining = true;
    if (conn->client->conn == conn)
        conn->client->conn = NULL;
    return 0;
}

/* Connections. */

static void conn_free(struct client_conn *conn)
{
    if (conn->client->conn == conn)
        conn->client->conn = NULL;
    LIST_REMOVE(conn, link);
    h2_clear(&conn->h2);
    free(conn);
}

static void on_closed(struct h2 *h2, int code, const char *why)
{
    struct client_conn *conn = (struct client_conn *)h2;
    struct grpc_client_call *call;
    char text[CLIENT_TEXT_MAX];

    snprintf(text, sizeof text, "connection to %.300s: %s%s%s", conn->client->target, why,
             code && code != -EPIPE ? ": " : "", code && code != -EPIPE ? strerror(-code) : "");
    while ((call = LIST_FIRST(&conn->calls))) {
        set_status(call, GRPC_UNAVAILABLE, text);
        end_call(call);
    }
    conn_free(conn);
}

/* A connection without calls that takes no new ones is given up. */
static void on_settled(struct h2 *h2)
{
    struct client_conn *conn = (struct client_conn *)h2;

    if (conn->draining && LIST_EMPTY(&conn->calls))
        h2_fail(h2, 0, "closed in good order");
}

static const struct h2_ops ops = {.settled = on_settled, .closed = on_closed};

static int session_new(struct client_conn *conn)
{
    nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_ENABLE_PUSH, 0},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW},
        {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, 16 * 1024},
    };
    nghttp2_session_callbacks *callbacks;

    if (nghttp2_session_callbacks_new(&callbacks))
        return -ENOMEM;
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_stream_close);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame_recv);
    int r = nghttp2_session_client_new(&conn->h2.session, callbacks, conn);
    nghttp2_session_callbacks_del(callbacks);
    if (r || nghttp2_submit_settings(conn->h2.session, 0, settings, ARRAY_LEN(settings)) ||
        nghttp2_session_set_local_window_size(conn->h2.session, 0, 0, CONNECTION_WINDOW))
        return -ENOMEM;
    return 0;
}

int grpc_client_connect(struct grpc_client *client, struct error *err)
{
    bool connecting;

    if (client->conn && !client->conn->h2.over)
        return 0;
    client->conn = NULL;
    int fd = client_socket(client->target, &connecting, err);
    if (fd < 0)
        return fd;
    struct client_conn *conn = mem_alloc(1, sizeof *conn);
    if (!conn) {
        fd_close(fd);
        return error_set(err, ENOMEM, "no memory for a connection");
    }
    conn->client = client;
    LIST_INIT(&conn->calls);
    LIST_INSERT_HEAD(&client->conns, conn, link);
    if (h2_init(&conn->h2, client->base, fd, &ops) < 0 || session_new(conn) < 0) {
        conn_free(conn);
        return error_set(err, ENOMEM, "no memory for a connection");
    }
    client->conn = conn;
    h2_start(&conn->h2, connecting);
    return 0;
}

/* Starting calls. */

static ssize_t read_request(nghttp2_session *session, int32_t stream_id, uint8_t *to, size_t room,
                            uint32_t *flags, nghttp2_data_source *source, void *user)
{
    struct grpc_client_call *call = call_of(session, stream_id);

    if (!call) /* ended meanwhile: its RST_STREAM is on the way */
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
    size_t n = MIN(room, call->out.len - call->out_pos);
    memcpy(to, call->out.data + call->out_pos, n);
    call->out_pos += n;
    if (call->out_pos == call->out.len)
        *flags |= NGHTTP2_DATA_FLAG_EOF;
    return (ssize_t)n;
}

static int submit(struct grpc_client_call *call, const char *path, uint64_t timeout_ms)
{
    char timeout[GRPC_TIMEOUT_TEXT_MAX] = "";
    nghttp2_nv nv[8];
    size_t n = 0;
    nghttp2_data_provider provider = {.read_callback = read_request};

    nv[n++] = h2_header(":method", "POST");
    nv[n++] = h2_header(":scheme", "http");
    nv[n++] = h2_header(":path", path);
    nv[n++] = h2_header(":authority", "localhost");
    nv[n++] = h2_header("te", "trailers");
    nv[n++] = h2_header("content-type", "application/grpc");
    nv[n++] = h2_header("user-agent", "ember-grpc/1");
    if (timeout_ms) {
        grpc_timeout_format(timeout_ms, timeout);
        nv[n++] = h2_header("grpc-timeout", timeout);
    }
    return nghttp2_submit_request(call->conn->h2.session, NULL, nv, n, &provider, call);
}

static int start_deadline(struct grpc_client_call *call, uint64_t timeout_ms)
{
    struct timeval tv = {.tv_sec = (time_t)(MIN(timeout_ms, INT32_MAX * UINT64_C(1000)) / 1000),
                         .tv_usec = (suseconds_t)(timeout_ms % 1000 * 1000)};

    call->deadline_event = evtimer_new(call->client->base, on_deadline, call);
    return call->deadline_event && evtimer_add(call->deadline_event, &tv) == 0 ? 0 : -ENOMEM;
}

int grpc_client_start(struct grpc_client *client, const char *path, const ProtobufCMessage *request,
                      const ProtobufCMessageDescriptor *response, uint64_t timeout_ms,
                      const struct grpc_client_callbacks *callbacks, void *user,
                      struct grpc_client_call **ret_call, struct error *err)
{
    int r = grpc_client_connect(client, err);
    if (r < 0)
        return r;
    struct grpc_client_call *call = mem_alloc(1, sizeof *call);
    if (!call)
        return error_set(err, ENOMEM, "no memory for a call");
    call->client = client;
    call->conn = client->conn;
    call->response = response;
    call->callbacks = *callbacks;
    call->user = user;
    call->reader.max = client->max_message;
    r = grpc_frame_append(&call->out, request, UINT32_MAX);
    if (r == 0 && timeout_ms)
        r = start_deadline(call, timeout_ms);
    if (r == 0) {
        call->stream_id = submit(call, path, timeout_ms);
        if (call->stream_id == NGHTTP2_ERR_STREAM_ID_NOT_AVAILABLE) {
            call->conn->draining = true; /* 2^30 calls: time for a new connection */
            client->conn = NULL;
            call_free(call);
            return grpc_client_start(client, path, request, response, timeout_ms, callbacks, user,
                                     ret_call, err);
        }
        r = call->stream_id < 0 ? -ENOMEM : 0;
    }
    if (r < 0) {
        call_free(call);
        return error_sys(err, -r, "cannot start %s", path);
    }
    LIST_INSERT_HEAD(&call->conn->calls, call, link);
    h2_wake(&call->conn->h2);
    if (ret_call)
        *ret_call = call;
    return 0;
}

/* Life and end of the client. */

int grpc_client_new(struct event_base *base, const char *target, size_t max_message,
                    struct grpc_client **ret_client, struct error *err)
{
    int r = client_check_target(target, err);
    if (r < 0)
        return r;
    struct grpc_client *client = x_alloc(sizeof *client);
    client->own_base = !base;
    client->base = base ? base : event_base_new();
    client->target = x_strdup(target);
    client->max_message = max_message ? max_message : 4 * MIB;
    LIST_INIT(&client->conns);
    TAILQ_INIT(&client->ended);
    if (client->base)
        client->ended_event = event_new(client->base, -1, 0, on_ended, client);
    if (!client->ended_event) {
        grpc_client_free(client);
        return error_set(err, ENOMEM, "cannot make an event loop");
    }
    *ret_client = client;
    return 0;
}

void grpc_client_free(struct grpc_client *client)
{
    struct client_conn *conn;
    struct grpc_client_call *call;

    if (!client)
        return;
    while ((conn = LIST_FIRST(&client->conns))) {
        while ((call = LIST_FIRST(&conn->calls))) {
            LIST_REMOVE(call, link);
            call_free(call);
        }
        conn_free(conn);
    }
    while ((call = TAILQ_FIRST(&client->ended))) {
        TAILQ_REMOVE(&client->ended, call, ended_link);
        call_free(call);
    }
    if (client->ended_event)
        event_free(client->ended_event);
    if (client->own_base && client->base)
        event_base_free(client->base);
    free(client->target);
    free(client);
}

enum grpc_status grpc_client_last_status(const struct grpc_client *client)
{
    return client->last_status;
}
