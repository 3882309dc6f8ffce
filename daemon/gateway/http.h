/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The HTTP server: evhttp with what it lacks. TLS; limits on headers, bodies, slow clients and slow
 * readers; clients that go away are noticed while their request is worked on; API keys; CORS;
 * request ids in and out. HTTP/1.1.
 *
 * Every request ends by exactly one of http_reply, http_stream_end, http_abort, or `gone`.
 */
#ifndef EMBER_DAEMON_GATEWAY_HTTP_H
#define EMBER_DAEMON_GATEWAY_HTTP_H

#include <event2/event.h>
#include <stdbool.h>

#include "base/error.h"
#include "base/mem.h"
#include "daemon/gateway/options.h"

struct http_server;
struct http_request;

/* A request whose headers and body are complete, past key and CORS. */
typedef void (*http_handler)(void *ctx, struct http_request *request);

/* Serves on listen_fd, a listening socket that it takes; -1: on options->listen. */
int http_server_new(struct event_base *base, const struct gateway_options *options, int listen_fd,
                    http_handler handler, void *ctx, struct http_server **ret, struct error *err);
void http_server_free(struct http_server *server);
/* Reads keys and certificates again; on failure the old ones stay. */
int http_server_reload(struct http_server *server, struct error *err);
/* host:port that is listened on. */
const char *http_server_address(const struct http_server *server);
/* Requests that have not ended. */
unsigned http_server_active(const struct http_server *server);

/* "GET" (HEAD as well), "POST" or "another"; and the path without the query. */
const char *http_method(const struct http_request *request);
const char *http_path(const struct http_request *request);
/* The query's first value of that name, decoded; false when there is none or it does not fit. */
bool http_query(const struct http_request *request, const char *name, char *ret, size_t room);
/* The client's id, or ours: at most 64 printable characters. */
const char *http_id(const struct http_request *request);
/* The id that the body asks for: taken unless a header has said one, or it is not of that form. */
void http_take_id(struct http_request *request, const char *id);
/* Whom the request counts for in the queue: its API key, or its address. */
uint64_t http_client(const struct http_request *request);
uint64_t http_received_ns(const struct http_request *request);
/* The body, the caller's to free; NUL-terminated. NULL when memory is short. */
char *http_take_body(struct http_request *request, size_t *ret_len);
/* Called when the client goes away before the end; the request is gone when it returns. */
void http_on_gone(struct http_request *request, void (*gone)(void *user), void *user);

/* A header for the reply. */
void http_header(struct http_request *request, const char *name, const char *value);
/* The whole reply; the request is gone. */
void http_reply(struct http_request *request, int status, const char *type, const void *body,
                size_t len);
/*
 * An error as OpenAI's clients read it; the request is gone. type NULL: what belongs to the status.
 * code and param may be NULL. retry_s > 0 becomes Retry-After.
 */
void http_fail(struct http_request *request, int status, const char *type, const char *code,
               const char *param, unsigned retry_s, const char *text);
/* 405 with the methods that are allowed; the request is gone. */
void http_not_allowed(struct http_request *request, const char *allow);
/* The error object alone, as http_fail and a stream's last words have it. */
void http_error_json(struct buffer *out, int status, const char *type, const char *code,
                     const char *param, const char *text);

/* text/event-stream, piece by piece. What is sent leaves with http_flush, at the latest with the
 * stream's end. */
void http_stream_begin(struct http_request *request);
/* False: the reader is too slow or memory short; the caller ends its work and calls http_abort. */
bool http_stream_send(struct http_request *request, const void *data, size_t len);
void http_stream_end(struct http_request *request);
/* Once a turn of the loop: everything that streams have been given goes out. */
void http_flush(struct http_server *server);
/* Closes the connection; `gone` is not called. The request is gone. */
void http_abort(struct http_request *request);

#endif
