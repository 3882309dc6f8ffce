/* SPDX-License-Identifier: Apache-2.0 */
/* What http.c (the server, what comes in) and http_reply.c (what goes out) share. */
#ifndef EMBER_DAEMON_GATEWAY_HTTP_PRIVATE_H
#define EMBER_DAEMON_GATEWAY_HTTP_PRIVATE_H

#include <event2/http.h>
#include <sys/queue.h>

#include "daemon/address.h"
#include "daemon/gateway/http.h"

struct http_server {
    const struct gateway_options *options;
    struct event_base *base;
    struct evhttp *http;
    http_handler handler;
    void *ctx;
    struct keys *keys; /* NULL: everybody may ask */
    struct tls *tls;   /* NULL: plain HTTP */
    struct guard *guard;
    struct event *sweep;
    char address[ADDRESS_TEXT_MAX];
    unsigned active;
    TAILQ_HEAD(, http_request) unsent; /* streams with something pending */
};

struct http_request {
    struct http_server *server;
    struct evhttp_request *ev;
    struct event *closed;
    char id[65];
    bool id_given; /* by the client's header */
    uint64_t client, received_ns;
    void (*gone)(void *user);
    void *user;
    /* Of a stream: what http_flush sends as one chunk, behind room for the chunk's size. */
    TAILQ_ENTRY(http_request) unsent;
    struct buffer pending;
    bool chunked;         /* HTTP/1.1 */
    struct evbuffer *out; /* of its connection, and the socket: set when the stream begins */
    int fd;
    bool behind;    /* `out` may hold something */
    bool encrypted; /* this connection, whatever a reload has made of new ones */
};

/* The bufferevent of its connection, which it still has. */
struct bufferevent *http_bev(struct evhttp_request *ev);
/* No event of the connection concerns the request any more. */
void http_detach(struct http_request *request);
/* Ours alone: evhttp's request lives on. */
void http_request_free(struct http_request *request);

#endif
