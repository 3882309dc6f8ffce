/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the server. nghttp2 checks HTTP/2 itself and enforces the number of streams; here
 * are the guards that it leaves to its user: clients that reset what they ask for, that send
 * control frames without end, or that stop half-way through a frame.
 */
#include "proto/grpc/server-internal.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/fd.h"

enum { PREFACE_SIZE = 24, STREAM_WINDOW = 512 * 1024, CONNECTION_WINDOW = 4 * 1024 * 1024 };

/* Guards. */

static bool bucket_take(struct bucket *bucket)
{
    uint64_t now = clock_ns();

    bucket->tokens =
        MIN(bucket->burst, bucket->tokens + (double)(now - bucket->last_ns) / 1e9 * bucket->rate);
    bucket->last_ns = now;
    if (bucket->tokens < 1)
        return false;
    bucket->tokens -= 1;
    return true;
}

static void take_or_end(struct server_conn *conn, struct bucket *bucket)
{
    if (!bucket_take(bucket))
        nghttp2_session_terminate_session(conn->h2.session, NGHTTP2_ENHANCE_YOUR_CALM);
}

/* Follows the frame boundaries of what arrives. nghttp2 judges the content afterwards. */
static void on_received(struct h2 *h2, const uint8_t *data, size_t n)
{
    struct server_conn *conn = (struct server_conn *)h2;

    while (n) {
        if (conn->skip) {
            size_t take = MIN(n, conn->skip);
            conn->skip -= take;
            data += take;
            n -= take;
            conn->frame_ended |= !conn->skip;
            continue;
        }
        conn->frame_header[conn->n_frame_header++] = *data++;
        n--;
        if (conn->n_frame_header == sizeof conn->frame_header) {
            const uint8_t *h = conn->frame_header;
            conn->skip = (size_t)h[0] << 16 | (size_t)h[1] << 8 | h[2];
            conn->n_frame_header = 0;
            conn->frame_ended |= !conn->skip;
        }
    }
}

/* A connection at rest may stay; one that is half-way has until the stall timer. */
static void on_settled(struct h2 *h2)
{
    struct server_conn *conn = (struct server_conn *)h2;
    unsigned ms = conn->server->options.stall_ms;
    struct timeval tv = {.tv_sec = ms / 1000, .tv_usec = (suseconds_t)(ms % 1000) * 1000};
    bool halfway = conn->skip || conn->n_frame_header || conn->in_headers || !conn->had_settings ||
                   !nghttp2_session_want_read(h2->session);
    bool timing = evtimer_pending(conn->stall_event, NULL);

    if (halfway && (!timing || conn->frame_ended))
        evtimer_add(conn->stall_event, &tv);
    else if (!halfway && timing)
        evtimer_del(conn->stall_event);
    conn->frame_ended = false;
}

static void on_stalled(evutil_socket_t fd, short what, void *user)
{
    struct server_conn *conn = user;

    h2_fail(&conn->h2, -ETIMEDOUT, "half a frame, and then nothing");
}

static void on_closed(struct h2 *h2, int code, const char *why)
{
    conn_free((struct server_conn *)h2);
}

static const struct h2_ops ops = {
    .received = on_received, .settled = on_settled, .closed = on_closed};

/* nghttp2's callbacks. */

static struct grpc_call *call_of(nghttp2_session *session, int32_t stream_id)
{
    return nghttp2_session_get_stream_user_data(session, stream_id);
}

static int on_begin_headers(nghttp2_session *session, const nghttp2_frame *frame, void *user)
{
    struct server_conn *conn = user;

    conn->in_headers = true;
    if (frame->headers.cat != NGHTTP2_HCAT_REQUEST)
        return 0;
    struct grpc_call *call = call_new(conn, frame->hd.stream_id);
    if (!call)
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE;
    nghttp2_session_set_stream_user_data(session, frame->hd.stream_id, call);
    return 0;
}

static int on_header(nghttp2_session *session, const nghttp2_frame *frame, const uint8_t *name,
                     size_t name_len, const uint8_t *value, size_t value_len, uint8_t flags,
                     void *user)
{
    struct grpc_call *call = call_of(session, frame->hd.stream_id);

    if (!call || frame->headers.cat != NGHTTP2_HCAT_REQUEST)
        return 0; /* trailers of a request mean nothing in gRPC */
    if (call_header(call, (const char *)name, name_len, (const char *)value, value_len) < 0)
        return NGHTTP2_ERR_TEMPORAL_CALLBACK_FAILURE; /* resets the stream */
    return 0;
}

static void count_control(struct server_conn *conn, const nghttp2_frame *frame)
{
    bool empty_data = frame->hd.type == NGHTTP2_DATA && frame->hd.length == 0 &&
                      !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM);

    if (frame->hd.type == NGHTTP2_RST_STREAM)
        take_or_end(conn, &conn->resets);
    else if (frame->hd.type == NGHTTP2_PING || frame->hd.type == NGHTTP2_PRIORITY || empty_data ||
             (frame->hd.type == NGHTTP2_SETTINGS && !(frame->hd.flags & NGHTTP2_FLAG_ACK)))
        take_or_end(conn, &conn->controls);
}

static int on_frame_recv(nghttp2_session *session, const nghttp2_frame *frame, void *user)
{
    struct server_conn *conn = user;
    struct grpc_call *call = NULL;

    count_control(conn, frame);
    if (frame->hd.type == NGHTTP2_SETTINGS)
        conn->had_settings = true;
    if (frame->hd.type == NGHTTP2_HEADERS)
        conn->in_headers = false;
    if (frame->hd.type == NGHTTP2_HEADERS || frame->hd.type == NGHTTP2_DATA)
        call = call_of(session, frame->hd.stream_id);
    if (!call)
        return 0;
    call->refs++; /* a handler may finish it */
    if (frame->hd.type == NGHTTP2_HEADERS && frame->headers.cat == NGHTTP2_HCAT_REQUEST)
        call_begin(call);
    if (frame->hd.flags & NGHTTP2_FLAG_END_STREAM)
        call_request_done(call);
    call_unref(call);
    return 0;
}

/* Frames that nghttp2 answers with RST_STREAM by itself cost the client as much as its own resets.
 */
static int on_invalid_frame(nghttp2_session *session, const nghttp2_frame *frame, int code,
                            void *user)
{
    struct server_conn *conn = user;

    conn->in_headers = false;
    take_or_end(conn, &conn->resets);
    return 0;
}

static int on_data(nghttp2_session *session, uint8_t flags, int32_t stream_id, const uint8_t *data,
                   size_t n, void *user)
{
    struct grpc_call *call = call_of(session, stream_id);

    if (call)
        call_data(call, data, n);
    return 0;
}

static int on_stream_close(nghttp2_session *session, int32_t stream_id, uint32_t code, void *user)
{
    struct grpc_call *call = call_of(session, stream_id);
    struct server_conn *conn = user;

    conn->in_headers = false;
    if (call)
        call_stream_closed(call);
    return 0;
}

/* An answer that is complete before the request is: tell the client to stop sending. */
static int on_frame_send(nghttp2_session *session, const nghttp2_frame *frame, void *user)
{
    if (frame->hd.type != NGHTTP2_HEADERS || !(frame->hd.flags & NGHTTP2_FLAG_END_STREAM))
        return 0;
    if (nghttp2_session_get_stream_remote_close(session, frame->hd.stream_id) == 0)
        nghttp2_submit_rst_stream(session, NGHTTP2_FLAG_NONE, frame->hd.stream_id,
                                  NGHTTP2_NO_ERROR);
    return 0;
}

static int session_new(struct server_conn *conn)
{
    nghttp2_session_callbacks *callbacks;
    nghttp2_option *option;

    if (nghttp2_session_callbacks_new(&callbacks))
        return -ENOMEM;
    if (nghttp2_option_new(&option)) {
        nghttp2_session_callbacks_del(callbacks);
        return -ENOMEM;
    }
    nghttp2_session_callbacks_set_on_begin_headers_callback(callbacks, on_begin_headers);
    nghttp2_session_callbacks_set_on_header_callback(callbacks, on_header);
    nghttp2_session_callbacks_set_on_frame_recv_callback(callbacks, on_frame_recv);
    nghttp2_session_callbacks_set_on_invalid_frame_recv_callback(callbacks, on_invalid_frame);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(callbacks, on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(callbacks, on_stream_close);
    nghttp2_session_callbacks_set_on_frame_send_callback(callbacks, on_frame_send);
    nghttp2_option_set_no_closed_streams(option, 1);
    /* Our own budget answers first, with ENHANCE_YOUR_CALM. */
    nghttp2_option_set_stream_reset_rate_limit(option, 1000000, 1000000);
    int r = nghttp2_session_server_new2(&conn->h2.session, callbacks, conn, option);
    nghttp2_option_del(option);
    nghttp2_session_callbacks_del(callbacks);
    return r ? -ENOMEM : 0;
}

static int submit_settings(struct server_conn *conn)
{
    nghttp2_settings_entry settings[] = {
        {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS, conn->server->options.max_streams},
        {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, HEADER_LIST_MAX},
        {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, STREAM_WINDOW},
        {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1},
    };

    return nghttp2_submit_settings(conn->h2.session, NGHTTP2_FLAG_NONE, settings,
                                   ARRAY_LEN(settings)) ||
                   nghttp2_session_set_local_window_size(conn->h2.session, NGHTTP2_FLAG_NONE, 0,
                                                         CONNECTION_WINDOW)
               ? -ENOMEM
               : 0;
}

static struct bucket bucket_full(unsigned burst, double rate)
{
    return (struct bucket){.tokens = burst, .burst = burst, .rate = rate, .last_ns = clock_ns()};
}

int conn_new(struct grpc_server *server, int fd, const struct ucred *peer, struct error *err)
{
    struct server_conn *conn = mem_alloc(1, sizeof *conn);

    if (!conn) {
        fd_close(fd);
        return error_set(err, ENOMEM, "no memory for a connection");
    }
    conn->server = server;
    conn->has_peer = peer;
    conn->peer = peer ? *peer : (struct ucred){0};
    conn->skip = PREFACE_SIZE;
    conn->resets = bucket_full(server->options.reset_budget, 100);
    conn->controls = bucket_full(server->options.control_budget, 1000);
    LIST_INIT(&conn->calls);
    LIST_INSERT_HEAD(&server->conns, conn, link);
    server->stats.open_connections++;
    server->stats.connections++;
    conn->stall_event = evtimer_new(server->base, on_stalled, conn);
    if (h2_init(&conn->h2, server->base, fd, &ops) < 0 || !conn->stall_event ||
        session_new(conn) < 0 || submit_settings(conn) < 0) {
        conn_free(conn);
        return error_set(err, ENOMEM, "no memory for a connection");
    }
    h2_start(&conn->h2, false);
    return 0;
}

void conn_free(struct server_conn *conn)
{
    struct grpc_server *server = conn->server;

    while (!LIST_EMPTY(&conn->calls))
        call_stream_closed(LIST_FIRST(&conn->calls));
    LIST_REMOVE(conn, link);
    h2_clear(&conn->h2);
    if (conn->stall_event)
        event_free(conn->stall_event);
    free(conn);
    server_conn_gone(server);
}

void conn_goaway(struct server_conn *conn)
{
    nghttp2_session *session = conn->h2.session;

    nghttp2_submit_goaway(session, NGHTTP2_FLAG_NONE,
                          nghttp2_session_get_last_proc_stream_id(session), NGHTTP2_NO_ERROR, NULL,
                          0);
    h2_wake(&conn->h2);
}
