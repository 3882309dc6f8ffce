/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/guard.h"

#include <event2/buffer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/gateway/http.h"
#include "daemon/gateway/linger.h"

#define PAGE_MAX 4096 /* of evhttp's own pages */

/* By descriptor: the request that has begun to come. One that came with the request before it has
 * not been seen to begin, but may be refused as well. */
struct coming {
    uint64_t cookie, since_ns; /* since_ns 0: none */
    size_t bytes;
    bool refused; /* by evhttp, whose page is on its way */
};

struct guard {
    struct coming *coming;
    size_t n, n_coming;
    const struct gateway_options *options;
    struct lingerers *lingerers;
    void (*begun)(void *arg);
    void *arg;
};

/* The callbacks' argument besides the guard. Of a process there is one guard. */
static struct guard *the_guard;

static uint64_t cookie_of(int fd)
{
    uint64_t cookie = 0;
    socklen_t len = sizeof cookie;

    return getsockopt(fd, SOL_SOCKET, SO_COOKIE, &cookie, &len) < 0 ? 0 : cookie;
}

static void on_input(struct evbuffer *in, const struct evbuffer_cb_info *info, void *arg)
{
    struct guard *g = the_guard;
    int fd = bufferevent_getfd(arg);

    if (!info->n_added || fd < 0 || !g)
        return;
    if ((size_t)fd >= g->n) {
        size_t n = MAX((size_t)fd + 1, 2 * g->n);
        g->coming = x_realloc(g->coming, n * sizeof *g->coming);
        memset(g->coming + g->n, 0, (n - g->n) * sizeof *g->coming);
        g->n = n;
    }
    struct coming *c = &g->coming[fd];
    uint64_t cookie = cookie_of(fd);
    if (c->since_ns && c->cookie == cookie) {
        c->bytes += info->n_added;
        return;
    }
    g->n_coming += !c->since_ns;
    *c = (struct coming){cookie, clock_ns(), info->n_added, c->refused && c->cookie == cookie};
    if (g->n_coming == 1)
        g->begun(g->arg);
}

void guard_arrived(struct guard *guard, int fd)
{
    if (fd < 0 || (size_t)fd >= guard->n)
        return;
    guard->n_coming -= guard->coming[fd].since_ns != 0;
    guard->coming[fd].since_ns = 0;
}

unsigned guard_sweep(struct guard *guard, uint64_t now, uint64_t limit_ns, size_t *ret_coming)
{
    unsigned ended = 0;

    for (size_t fd = 0; fd < guard->n; fd++) {
        struct coming *c = &guard->coming[fd];
        if (!c->since_ns || now - c->since_ns < limit_ns)
            continue;
        c->since_ns = 0;
        guard->n_coming--;
        if (cookie_of((int)fd) != c->cookie) /* it has ended by itself */
            continue;
        shutdown((int)fd, SHUT_RDWR);
        ended++;
    }
    *ret_coming = guard->n_coming;
    return ended;
}

/* ---- evhttp's own pages ---- */

static void replace(struct evbuffer *out, int status, size_t len)
{
    static const struct {
        int status;
        const char *line, *text;
    } known[] = {
        {400, "Bad Request", "The request is malformed."},
        {413, "Request Entity Too Large", "The request is larger than this server accepts."},
        {431, "Request Header Fields Too Large",
         "The headers are larger than this server accepts."},
        {501, "Not Implemented", "No such method."},
        {500, "Internal Server Error", "The request could not be handled."},
    };
    struct buffer body = {0};
    size_t i = 0;

    while (i + 1 < ARRAY_LEN(known) && known[i].status != status)
        i++;
    http_error_json(&body, known[i].status, NULL,
                    status == 413   ? "request_too_large"
                    : status == 431 ? "headers_too_large"
                                    : NULL,
                    NULL, known[i].text);
    evbuffer_drain(out, len);
    evbuffer_add_printf(out,
                        "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: "
                        "%zu\r\nConnection: close\r\n\r\n",
                        known[i].status, known[i].line, body.len);
    evbuffer_add(out, body.data, body.len);
    buffer_free(&body);
    log_debug("request refused by its form", "status=%d", known[i].status);
}

/* NULL: nothing has ever come there. */
static struct coming *coming_of(struct bufferevent *bev)
{
    struct guard *g = the_guard;
    int fd = bufferevent_getfd(bev);

    return g && fd >= 0 && (size_t)fd < g->n ? &g->coming[fd] : NULL;
}

/* evhttp says 400 of headers that are too large as well. */
static int status_of(int status, const struct coming *c)
{
    return status == 400 && c && c->since_ns && c->bytes > the_guard->options->max_headers ? 431
                                                                                           : status;
}

/* The first bytes, however the buffer keeps them; a frozen one lets nobody copy. */
static bool begins_with_an_error(struct evbuffer *out)
{
    struct evbuffer_iovec first;

    if (evbuffer_peek(out, 10, NULL, &first, 1) < 1 || first.iov_len < 10)
        return false;
    const char *p = first.iov_base;
    return !memcmp(p, "HTTP/1.", 7) && (p[9] == '4' || p[9] == '5');
}

/*
 * Called for each piece that is written; all but the pieces of an error return at once. A
 * bufferevent freezes the front of its output except while it writes.
 */
static void on_output(struct evbuffer *out, const struct evbuffer_cb_info *info, void *arg)
{
    char page[PAGE_MAX + 1];
    size_t len = evbuffer_get_length(out);
    struct coming *c = info->n_added || !len ? coming_of(arg) : NULL;

    if (!len && c && c->refused) { /* it is with the kernel, and evhttp will close */
        c->refused = false;
        linger(the_guard->lingerers, bufferevent_getfd(arg));
    }
    if (!info->n_added || len < 32 || len > PAGE_MAX || !begins_with_an_error(out))
        return;
    bool frozen = evbuffer_copyout(out, page, len) < 0;
    if (frozen)
        evbuffer_unfreeze(out, 1);
    if (evbuffer_copyout(out, page, len) == (ev_ssize_t)len) {
        page[len] = 0;
        if (strstr(page, "\r\nContent-Type: text/html") && strstr(page, "</HTML>")) {
            replace(out, status_of(atoi(page + 9), c), len);
            if (c)
                c->refused = true;
        }
    }
    if (frozen)
        evbuffer_freeze(out, 1);
}

/* ---- connections ---- */

struct guard *guard_new(struct event_base *base, const struct gateway_options *options,
                        void (*begun)(void *arg), void *arg)
{
    the_guard = x_alloc(sizeof *the_guard);
    the_guard->options = options;
    the_guard->lingerers = lingerers_new(base, options);
    the_guard->begun = begun;
    the_guard->arg = arg;
    return the_guard;
}

void guard_free(struct guard *guard)
{
    if (!guard)
        return;
    the_guard = NULL;
    lingerers_free(guard->lingerers);
    free(guard->coming);
    free(guard);
}

void guard_watch(struct guard *guard, struct bufferevent *bev)
{
    evbuffer_add_cb(bufferevent_get_input(bev), on_input, bev);
    evbuffer_add_cb(bufferevent_get_output(bev), on_output, bev);
}
