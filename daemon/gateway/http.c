/* SPDX-License-Identifier: Apache-2.0 */
/*
 * evhttp stops reading a connection while a request is worked on, so a client that leaves shows
 * only in a failed write. Each request therefore has an EV_CLOSED event (the peer's FIN) of its
 * own. A client that goes away comes here in one of two ways: that event, and then we free the
 * connection and evhttp its request; or evhttp's close callback, behind which the request is ours.
 */
#include "daemon/gateway/http_private.h"

#include <ctype.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/keyvalq_struct.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/digest.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/gateway/guard.h"
#include "daemon/gateway/keys.h"
#include "daemon/gateway/tls.h"

/* All of them come to us: a 405 of ours is better than a 501 of evhttp's. */
#define METHODS                                                                                    \
    (EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_HEAD | EVHTTP_REQ_OPTIONS | EVHTTP_REQ_PUT |    \
     EVHTTP_REQ_DELETE | EVHTTP_REQ_PATCH | EVHTTP_REQ_TRACE | EVHTTP_REQ_CONNECT)
#define SWEEP_US 250000
/* Bytes that one call may write: libevent's 16 KiB would be a turn of the loop for each piece of a
 * large reply. The socket takes what it has room for. */
#define WRITE_MOST (1 << 20)

/* ---- a request's life ---- */

static const char *in_header(const struct http_request *request, const char *name)
{
    return evhttp_find_header(evhttp_request_get_input_headers(request->ev), name);
}

struct bufferevent *http_bev(struct evhttp_request *ev)
{
    return evhttp_connection_get_bufferevent(evhttp_request_get_connection(ev));
}

void http_request_free(struct http_request *request)
{
    request->server->active--;
    if (request->pending.len)
        TAILQ_REMOVE(&request->server->unsent, request, unsent);
    buffer_free(&request->pending);
    event_free(request->closed);
    free(request);
}

void http_detach(struct http_request *request)
{
    struct evhttp_connection *connection = evhttp_request_get_connection(request->ev);

    if (connection)
        evhttp_connection_set_closecb(connection, NULL, NULL);
    event_del(request->closed);
}

static void tell_gone(struct http_request *request)
{
    if (request->gone)
        request->gone(request->user);
    http_request_free(request);
}

static void on_closed(int fd, short what, void *arg)
{
    struct http_request *request = arg;
    struct evhttp_connection *connection = evhttp_request_get_connection(request->ev);

    http_detach(request);
    if (connection)
        evhttp_connection_free(connection); /* and the request */
    tell_gone(request);
}

static void on_connection_closed(struct evhttp_connection *connection, void *arg)
{
    struct http_request *request = arg;

    event_del(request->closed);
    if (!evhttp_request_get_connection(request->ev))
        evhttp_request_free(request->ev);
    tell_gone(request);
}

static void watch(struct http_request *request)
{
    struct evhttp_connection *connection = evhttp_request_get_connection(request->ev);
    int fd = bufferevent_getfd(http_bev(request->ev)), on = 1;

    guard_arrived(request->server->guard, fd);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* pieces of a stream go at once */
    evhttp_connection_set_closecb(connection, on_connection_closed, request);
    request->closed = event_new(request->server->base, fd, EV_CLOSED, on_closed, request);
    event_add(request->closed, NULL);
}

/* False: it is none, or not of a form that may go anywhere. */
static bool use_id(struct http_request *request, const char *given)
{
    size_t n = given ? strlen(given) : 0;

    for (size_t i = 0; i < n; i++)
        if (!isgraph((unsigned char)given[i]) || given[i] == '"')
            return false;
    if (!n || n >= sizeof request->id)
        return false;
    memcpy(request->id, given, n + 1);
    return true;
}

void http_take_id(struct http_request *request, const char *id)
{
    if (!request->id_given && use_id(request, id))
        http_header(request, "X-Request-Id", request->id);
}

static void choose_id(struct http_request *request)
{
    uint8_t bytes[16];

    request->id_given = use_id(request, in_header(request, "X-Request-Id"));
    if (request->id_given)
        return;
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        abort(); /* cannot happen for 16 bytes once the host has booted */
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(request->id + 2 * i, 3, "%02x", bytes[i]);
}

/* ---- CORS: the Fetch standard's simple form, without credentials ---- */

static bool origin_allowed(const char *allowed, const char *origin)
{
    size_t n = strlen(origin);

    if (!strcmp(allowed, "*"))
        return true;
    for (const char *p = allowed; *p;) {
        p += strspn(p, " ,");
        size_t len = strcspn(p, " ,");
        if (len == n && !strncmp(p, origin, n))
            return true;
        p += len;
    }
    return false;
}

static void add_cors(struct http_request *request)
{
    const char *allowed = request->server->options->cors_origins;
    const char *origin = in_header(request, "Origin");

    if (!*allowed || !origin || !origin_allowed(allowed, origin))
        return;
    http_header(request, "Access-Control-Allow-Origin", strcmp(allowed, "*") ? origin : "*");
    http_header(request, "Vary", "Origin");
    http_header(request, "Access-Control-Expose-Headers", "X-Request-Id, Retry-After");
    if (evhttp_request_get_command(request->ev) != EVHTTP_REQ_OPTIONS)
        return;
    const char *headers = in_header(request, "Access-Control-Request-Headers");
    http_header(request, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    http_header(request, "Access-Control-Allow-Headers",
                headers ? headers : "Authorization, Content-Type");
    http_header(request, "Access-Control-Max-Age", "600");
}

/* Probes and scrapers ask without a key. */
static bool is_public(const char *path)
{
    static const char *const paths[] = {"/health", "/ping", "/version", "/metrics"};

    for (size_t i = 0; i < ARRAY_LEN(paths); i++)
        if (!strcmp(path, paths[i]))
            return true;
    return false;
}

static void identify(struct http_request *request)
{
    struct evhttp_connection *connection = evhttp_request_get_connection(request->ev);
    char *address = NULL;
    uint16_t port;

    evhttp_connection_get_peer(connection, &address, &port);
    request->client = checksum_of(address ? address : "", address ? strlen(address) : 0);
}

/* A token of RFC 9110, 5.6.2, which the name of a header is. */
static bool is_token(const char *text)
{
    const char *p = text;

    while (isalnum((unsigned char)*p) || (*p && strchr("!#$%&'*+-.^_`|~", *p)))
        p++;
    return p > text && !*p;
}

/*
 * Why the end of the body may have been another one to whoever stands before us, so that what comes
 * behind it is no request; NULL: it is plain. RFC 9112: 5.1 (blanks before the colon), 6.1, 6.3.
 */
static const char *ambiguous(const struct http_request *request)
{
    const char *length = in_header(request, "Content-Length");
    const struct evkeyval *h;

    TAILQ_FOREACH(h, evhttp_request_get_input_headers(request->ev), next)
    {
        if (!is_token(h->key))
            return "A header's name is malformed.";
        if (!strcasecmp(h->key, "Content-Length") && strcmp(h->value, length))
            return "Two different lengths of one body.";
        if (!strcasecmp(h->key, "Transfer-Encoding") && strcasecmp(h->value, "chunked"))
            return "Transfer-Encoding can be chunked, and nothing else.";
    }
    if (length && (!*length || length[strspn(length, "0123456789")]))
        return "Content-Length is not a decimal number.";
    return NULL;
}

static void on_request(struct evhttp_request *ev, void *arg)
{
    struct http_server *server = arg;
    struct http_request *request = x_alloc(sizeof *request);
    size_t key = 0;
    const char *why;

    request->server = server;
    request->ev = ev;
    request->received_ns = clock_ns();
    server->active++;
    watch(request);
    choose_id(request);
    identify(request);
    http_header(request, "X-Request-Id", request->id);
    add_cors(request);
    if ((why = ambiguous(request))) {
        http_header(request, "Connection", "close");
        http_fail(request, 400, NULL, NULL, NULL, 0, why);
        return;
    }
    if (evhttp_request_get_command(ev) == EVHTTP_REQ_OPTIONS) {
        http_header(request, "Allow", "GET, HEAD, POST, OPTIONS");
        http_reply(request, 204, NULL, NULL, 0);
        return;
    }
    if (server->keys)
        key = keys_find(server->keys, in_header(request, "Authorization"));
    if (server->keys && !key && !is_public(http_path(request))) {
        http_fail(request, 401, NULL, "invalid_api_key", NULL, 0,
                  in_header(request, "Authorization")
                      ? "Incorrect API key provided."
                      : "No API key was provided: send it as \"Authorization: Bearer KEY\".");
        return;
    }
    if (key)
        request->client = key;
    server->handler(server->ctx, request);
}

/* ---- the server ---- */

/* What is read from files: keys and certificates. Nothing changes unless all of it is good. */
static int read_files(struct http_server *server, struct error *err)
{
    const struct gateway_options *o = server->options;
    struct keys *keys = NULL;
    struct tls *tls = NULL;
    int r = 0;

    if (!*o->tls_certificate != !*o->tls_key)
        r = error_set(err, EINVAL, "tls_certificate and tls_key belong together: %s is missing",
                      *o->tls_key ? "tls_certificate" : "tls_key");
    if (r == 0 && *o->api_keys)
        r = keys_read(o->api_keys, &keys, err);
    if (r == 0 && *o->tls_key)
        r = tls_new(o->tls_certificate, o->tls_key, &tls, err);
    if (r < 0) {
        keys_free(keys);
        return r;
    }
    keys_free(server->keys);
    tls_free(server->tls);
    server->keys = keys;
    server->tls = tls;
    return 0;
}

int http_server_reload(struct http_server *server, struct error *err)
{
    return read_files(server, err);
}

/* For each new connection, before evhttp gives it its socket. */
static struct bufferevent *on_connection(struct event_base *base, void *arg)
{
    struct http_server *server = arg;
    struct bufferevent *bev = server->tls ? tls_bufferevent(server->tls, base)
                                          : bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);

    if (!bev)
        return NULL;
    bufferevent_set_max_single_write(bev, WRITE_MOST);
    guard_watch(server->guard, bev);
    return bev;
}

/* While requests are coming: nothing wakes up an idle gateway, or one that only streams. */
static void sweep_soon(void *arg)
{
    static const struct timeval often = {0, SWEEP_US};
    struct http_server *server = arg;

    if (!event_pending(server->sweep, EV_TIMEOUT, NULL))
        event_add(server->sweep, &often);
}

static void on_sweep(int fd, short what, void *arg)
{
    struct http_server *server = arg;
    size_t coming;
    unsigned n = guard_sweep(server->guard, clock_ns(), server->options->request_timeout, &coming);

    if (n)
        log_info("slow clients dropped", "count=%u", n);
    if (coming)
        sweep_soon(server);
}

static int listen_on(struct http_server *server, int fd, struct error *err)
{
    if (fd < 0)
        fd = address_listen(server->options->listen, err);
    if (fd < 0)
        return fd;
    address_of(fd, server->address);
    if (!evhttp_accept_socket_with_handle(server->http, fd)) {
        fd_close(fd);
        return error_set(err, ENOMEM, "cannot accept connections on %s", server->address);
    }
    return 0;
}

static void set_up(struct http_server *server)
{
    const struct gateway_options *o = server->options;
    struct timeval limit = {(time_t)(o->client_timeout / 1000000000u), 0};

    evhttp_set_allowed_methods(server->http, METHODS);
    evhttp_set_max_body_size(server->http, (ssize_t)o->max_body);
    evhttp_set_max_headers_size(server->http, (ssize_t)o->max_headers);
    evhttp_set_default_content_type(server->http, NULL);
    evhttp_set_timeout_tv(server->http, &limit);
    evhttp_set_gencb(server->http, on_request, server);
    evhttp_set_bevcb(server->http, on_connection, server);
}

int http_server_new(struct event_base *base, const struct gateway_options *options, int listen_fd,
                    http_handler handler, void *ctx, struct http_server **ret, struct error *err)
{
    struct http_server *server = x_alloc(sizeof *server);
    int r = 0;

    *server = (struct http_server){.options = options,
                                   .base = base,
                                   .handler = handler,
                                   .ctx = ctx,
                                   .guard = guard_new(base, options, sweep_soon, server),
                                   .http = evhttp_new(base)};
    TAILQ_INIT(&server->unsent);
    server->sweep = event_new(base, -1, 0, on_sweep, server);
    if (!server->http || !server->sweep)
        r = error_set(err, ENOMEM, "no memory for the HTTP server");
    if (r == 0)
        r = read_files(server, err);
    if (r == 0) {
        set_up(server);
        r = listen_on(server, TAKE_FD(listen_fd), err);
    }
    fd_close(listen_fd);
    if (r < 0)
        http_server_free(server);
    else
        *ret = server;
    return r;
}

void http_server_free(struct http_server *server)
{
    if (!server)
        return;
    if (server->http)
        evhttp_free(server->http);
    if (server->sweep)
        event_free(server->sweep);
    guard_free(server->guard);
    keys_free(server->keys);
    tls_free(server->tls);
    free(server);
}

const char *http_server_address(const struct http_server *server)
{
    return server->address;
}

unsigned http_server_active(const struct http_server *server)
{
    return server->active;
}

/* ---- what handlers ask ---- */

const char *http_method(const struct http_request *request)
{
    switch (evhttp_request_get_command(request->ev)) {
    case EVHTTP_REQ_GET:
    case EVHTTP_REQ_HEAD:
        return "GET";
    case EVHTTP_REQ_POST:
        return "POST";
    default:
        return "another";
    }
}

const char *http_path(const struct http_request *request)
{
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request->ev));
    return path ? path : "/";
}

bool http_query(const struct http_request *request, const char *name, char *ret, size_t room)
{
    const char *query = evhttp_uri_get_query(evhttp_request_get_evhttp_uri(request->ev));
    struct evkeyvalq pairs = {0};

    if (!query || evhttp_parse_query_str(query, &pairs) < 0)
        return false;
    const char *value = evhttp_find_header(&pairs, name);
    bool fits = value && strlen(value) < room;
    if (fits)
        strcpy(ret, value);
    evhttp_clear_headers(&pairs);
    return fits;
}

const char *http_id(const struct http_request *request)
{
    return request->id;
}

uint64_t http_client(const struct http_request *request)
{
    return request->client;
}

uint64_t http_received_ns(const struct http_request *request)
{
    return request->received_ns;
}

char *http_take_body(struct http_request *request, size_t *ret_len)
{
    struct evbuffer *in = evhttp_request_get_input_buffer(request->ev);
    size_t len = evbuffer_get_length(in);
    char *body = mem_alloc(len + 1, 1);

    if (!body)
        return NULL;
    int n = evbuffer_remove(in, body, len);
    *ret_len = (size_t)MAX(n, 0);
    return body;
}

void http_on_gone(struct http_request *request, void (*gone)(void *user), void *user)
{
    request->gone = gone;
    request->user = user;
}
