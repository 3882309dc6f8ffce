/* SPDX-License-Identifier: Apache-2.0 */
/* Replies, errors, streams. */
#include "daemon/gateway/http_private.h"

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/log.h"
#include "daemon/gateway/json.h"
#include "daemon/gateway/tls.h"

void http_header(struct http_request *request, const char *name, const char *value)
{
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request->ev);

    evhttp_remove_header(headers, name);
    evhttp_add_header(headers, name, value);
}

void http_reply(struct http_request *request, int status, const char *type, const void *body,
                size_t len)
{
    struct evbuffer *out = evhttp_request_get_output_buffer(request->ev);
    struct evhttp_request *ev = request->ev;
    struct bufferevent *bev = http_bev(ev);

    if (type)
        http_header(request, "Content-Type", type);
    if (evhttp_request_get_command(ev) == EVHTTP_REQ_HEAD) { /* the length alone */
        char length[24];
        snprintf(length, sizeof length, "%zu", len);
        http_header(request, "Content-Length", length);
    } else if (len) {
        evbuffer_add(out, body, len);
    }
    http_detach(request);
    http_request_free(request);
    evhttp_send_reply(ev, status, NULL, NULL);
    tls_tell_when_empty(bev);
}

static const char *type_of(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    default:
        return status < 500 ? "invalid_request_error" : "server_error";
    }
}

void http_error_json(struct buffer *out, int status, const char *type, const char *code,
                     const char *param, const char *text)
{
    js_raw(out, "{\"error\":{\"message\":");
    js_cstring(out, text);
    js_raw(out, ",\"type\":");
    js_cstring(out, type ? type : type_of(status));
    js_raw(out, ",\"param\":");
    js_cstring(out, param);
    js_raw(out, ",\"code\":");
    if (code)
        js_cstring(out, code);
    else
        js_printf(out, "%d", status);
    js_raw(out, "}}");
}

void http_fail(struct http_request *request, int status, const char *type, const char *code,
               const char *param, unsigned retry_s, const char *text)
{
    struct buffer out = {0};
    char seconds[16];

    log_debug("request refused", "request=%s status=%d error=\"%s\"", request->id, status, text);
    if (retry_s) {
        snprintf(seconds, sizeof seconds, "%u", retry_s);
        http_header(request, "Retry-After", seconds);
    }
    if (status == 401)
        http_header(request, "WWW-Authenticate", "Bearer");
    http_error_json(&out, status, type, code, param, text);
    http_reply(request, status, "application/json", out.data, out.len);
    buffer_free(&out);
}

void http_not_allowed(struct http_request *request, const char *allow)
{
    char text[96];

    http_header(request, "Allow", allow);
    snprintf(text, sizeof text, "Method Not Allowed: use %s.", allow);
    http_fail(request, 405, NULL, NULL, NULL, 0, text);
}

/* A client that is being streamed to has nothing to say: only bytes that it does not take count
 * against it. (evhttp starts its clock anew with each chunk, but these go past it.) */
static void set_limits(const struct http_request *request, struct bufferevent *bev, bool streaming)
{
    struct timeval limit = {(time_t)(request->server->options->client_timeout / 1000000000u), 0};

    bufferevent_set_timeouts(bev, streaming ? NULL : &limit, &limit);
}

void http_stream_begin(struct http_request *request)
{
    struct bufferevent *bev = http_bev(request->ev);

    request->out = bufferevent_get_output(bev);
    request->fd = bufferevent_getfd(bev);
    request->behind = true; /* the header */
    set_limits(request, bev, true);
    request->encrypted = tls_is_on(bev);
    http_header(request, "Content-Type", "text/event-stream; charset=utf-8");
    http_header(request, "Cache-Control", "no-cache");
    http_header(request, "X-Accel-Buffering", "no");
    evhttp_send_reply_start(request->ev, 200, NULL);
    request->chunked =
        evhttp_find_header(evhttp_request_get_output_headers(request->ev), "Transfer-Encoding");
}

/* ---- streams: what comes in one turn of the loop leaves as one chunk, by one system call ---- */

#define CHUNK_ROOM 10 /* eight digits, CR, LF */

/* Frames what is pending; the request leaves the list. */
static const char *take_chunk(struct http_request *request, size_t *ret_len)
{
    struct buffer *b = &request->pending;
    size_t left = b->len - CHUNK_ROOM;
    char *start = b->data + CHUNK_ROOM - 2;

    memcpy(start, "\r\n", 2);
    do
        *--start = "0123456789abcdef"[left % 16];
    while (left /= 16);
    memcpy(b->data + b->len, "\r\n", 2); /* http_stream_send has made room */
    *ret_len = b->len + 2 - (size_t)(start - b->data);
    b->len = 0;
    TAILQ_REMOVE(&request->server->unsent, request, unsent);
    return start;
}

/* Bytes that wait for the reader. */
static size_t backlog(struct http_request *request)
{
    size_t n = request->behind ? evbuffer_get_length(request->out) : 0;

    request->behind = n;
    return n;
}

/* Past evhttp, whose way is two changes of epoll and a turn of the loop for each piece; what the
 * socket does not take at once waits in its buffer, behind which nothing may be sent directly. */
static void flush_one(struct http_request *request)
{
    size_t len;
    const char *chunk = take_chunk(request, &len);

    if (!request->encrypted && !backlog(request)) {
        ssize_t n = send(request->fd, chunk, len, MSG_DONTWAIT | MSG_NOSIGNAL);
        chunk += MAX(n, 0);
        len -= (size_t)MAX(n, 0);
    }
    if (!len)
        return;
    evbuffer_add(request->out, chunk, len);
    request->behind = true;
}

void http_flush(struct http_server *server)
{
    while (!TAILQ_EMPTY(&server->unsent))
        flush_one(TAILQ_FIRST(&server->unsent));
}

bool http_stream_send(struct http_request *request, const void *data, size_t len)
{
    struct buffer *pending = &request->pending;

    if (!request->chunked) {
        struct evbuffer *piece = evhttp_request_get_output_buffer(request->ev);
        evbuffer_add(piece, data, len);
        evhttp_send_reply_chunk(request->ev, piece);
        request->behind = true;
    } else if (len) {
        if (buffer_reserve(pending, CHUNK_ROOM + len + 2) < 0)
            return false;
        if (!pending->len) {
            TAILQ_INSERT_TAIL(&request->server->unsent, request, unsent);
            pending->len = CHUNK_ROOM;
        }
        buffer_append(pending, data, len);
    }
    return backlog(request) + pending->len <= request->server->options->reader_backlog;
}

void http_stream_end(struct http_request *request)
{
    struct evhttp_request *ev = request->ev;
    struct bufferevent *bev = http_bev(ev);
    size_t len;

    set_limits(request, bev, false);
    if (request->pending.len) { /* with the last chunk, by one call */
        const char *chunk = take_chunk(request, &len);
        evbuffer_add(request->out, chunk, len);
    }
    http_detach(request);
    http_request_free(request);
    bufferevent_incref(bev); /* evhttp may end the connection at once */
    evhttp_send_reply_end(ev);
    tls_tell_when_empty(bev);
    bufferevent_decref(bev);
}

void http_abort(struct http_request *request)
{
    struct evhttp_connection *connection = evhttp_request_get_connection(request->ev);

    http_detach(request);
    http_request_free(request);
    if (connection)
        evhttp_connection_free(connection);
}
