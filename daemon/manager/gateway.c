/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gateway that emberd runs: OFF, or STARTING → SERVING → (its end) WAITING → STARTING ...
 *
 * We make the listening socket and keep it, so that a gateway that dies loses no connection that
 * has not been accepted: those wait in the socket for the next one. A gateway that cannot be
 * started again and again gives the port up between its starts, since waiting would be in vain. It
 * is told its options in GatewayStart; the end of the link tells it to drain and exit.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/manager/manager.h"

#define READY_WITHIN_NS UINT64_C(10000000000)
#define WORDS_MAX 128   /* of gateway_options */
#define FAILURES_PORT 3 /* starts in vain, after which the port is given up in between */
#define KILL_SPARE_NS UINT64_C(2000000000) /* beyond its own drain_timeout */
#define RETRY_FIRST_NS UINT64_C(50000000)
#define RETRY_MOST_NS UINT64_C(30000000000)

/* ---- its options ---- */

/* The words of the message, and what they point to. */
struct words {
    char *list[WORDS_MAX + 8];
    size_t n, n_owned; /* the first n_owned are freed */
    char *split;
};

static void words_free(struct words *w)
{
    for (size_t i = 0; i < w->n_owned; i++)
        free(w->list[i]);
    free(w->split);
}

/* Where our own control socket is: the configured path, or the one that systemd made. */
static const char *control_path(const struct mgr *mgr, struct sockaddr_un *room)
{
    socklen_t len = sizeof *room;

    if (mgr->n_listen_fds && getsockname(mgr->listen_fds[0], (struct sockaddr *)room, &len) == 0 &&
        room->sun_family == AF_UNIX && len > offsetof(struct sockaddr_un, sun_path) + 1)
        return room->sun_path;
    return mgr->options.socket;
}

/* The next word of *at, in place; double quotes keep blanks within one. NULL: none. */
static char *next_word(char **at)
{
    char *p = *at + strspn(*at, " "), *word = p, *to = p;
    bool quoted = false;

    if (!*p)
        return NULL;
    for (; *p && (quoted || *p != ' '); p++) {
        if (*p == '"')
            quoted = !quoted;
        else
            *to++ = *p;
    }
    *at = *p ? p + 1 : p;
    *to = 0;
    return word;
}

/* What people say comes last and counts. */
static void collect(const struct mgr *mgr, struct words *w)
{
    const struct emberd_options *o = &mgr->options;
    struct sockaddr_un room = {0};

    *w = (struct words){.split = x_strdup(o->gateway_options)};
    w->list[w->n++] = x_printf("--emberd=%s", control_path(mgr, &room));
    w->list[w->n++] = x_printf("--state-file=%s/gateway.leases", o->runtime_dir);
    w->list[w->n++] = x_printf("--cache-dir=%s", o->cache_dir);
    w->list[w->n++] = x_printf("--drain-timeout=%lluns", (unsigned long long)o->shutdown_timeout);
    if (*o->gateway_config)
        w->list[w->n++] = x_printf("--config=%s", o->gateway_config);
    w->n_owned = w->n;
    for (char *at = w->split, *p; w->n < ARRAY_LEN(w->list) && (p = next_word(&at));)
        w->list[w->n++] = p;
}

static void send_start(struct mgr *mgr)
{
    struct mgr_gateway *g = &mgr->gateway;
    Ember__V1__GatewayStart start = EMBER__V1__GATEWAY_START__INIT;
    Ember__V1__ToGateway message = EMBER__V1__TO_GATEWAY__INIT;
    struct words words;

    collect(mgr, &words);
    start.options = words.list;
    start.n_options = words.n;
    message.kind_case = EMBER__V1__TO_GATEWAY__KIND_START;
    message.start = &start;
    child_send(g->child, &message.base, &g->listen_fd, 1);
    words_free(&words);
}

void mgr_gateway_reload(struct mgr *mgr)
{
    Ember__V1__GatewayReload reload = EMBER__V1__GATEWAY_RELOAD__INIT;
    Ember__V1__ToGateway message = EMBER__V1__TO_GATEWAY__INIT;
    struct words words;

    if (!mgr->gateway.child || mgr->draining)
        return;
    collect(mgr, &words);
    reload.options = words.list;
    reload.n_options = words.n;
    message.kind_case = EMBER__V1__TO_GATEWAY__KIND_RELOAD;
    message.reload = &reload;
    child_send(mgr->gateway.child, &message.base, NULL, 0);
    words_free(&words);
}

/* ---- life ---- */

static void try_again(struct mgr *mgr, const struct error *why)
{
    struct mgr_gateway *g = &mgr->gateway;
    uint64_t delay = MIN(RETRY_FIRST_NS << MIN(g->failures, 16u), RETRY_MOST_NS);
    struct timeval tv = {(time_t)(delay / 1000000000u), (suseconds_t)(delay % 1000000000u / 1000)};

    g->failures++;
    g->state = GATEWAY_WAITING;
    if (g->failures >= FAILURES_PORT)
        g->listen_fd = fd_close(g->listen_fd);
    if (strcmp(g->error.text, why->text)) /* the same again and again is said once */
        log_warn("no gateway", "listen=%s error=\"%s\" next_start_s=%.1f",
                 mgr->options.gateway_listen, why->text, (double)delay / 1e9);
    g->error = *why;
    event_add(&g->on_retry, &tv);
}

static void gateway_message(void *owner, const uint8_t *data, size_t len, int *fds, size_t n_fds)
{
    struct mgr *mgr = owner;
    struct mgr_gateway *g = &mgr->gateway;
    Ember__V1__FromGateway *m = ember__v1__from_gateway__unpack(NULL, len, data);

    if (m && m->kind_case == EMBER__V1__FROM_GATEWAY__KIND_FAILED) {
        child_last_words(g->child, m->failed->error, "%s", m->failed->text);
    } else if (m && m->kind_case == EMBER__V1__FROM_GATEWAY__KIND_READY &&
               g->state == GATEWAY_STARTING) {
        g->state = GATEWAY_SERVING;
        g->error = (struct error){0};
        g->ready_ns = clock_ns();
        child_deadline(g->child, 0, NULL);
        log_info("gateway ready", "pid=%d listen=%s", (int)child_pid(g->child), g->address);
    } else if (g->state != GATEWAY_STOPPING) {
        child_last_words(g->child, EPROTO, "the gateway sent what it may not send now");
        child_kill(g->child);
    }
    ember__v1__from_gateway__free_unpacked(m, NULL);
}

static void gateway_exited(void *owner, const struct error *why)
{
    struct mgr *mgr = owner;
    struct mgr_gateway *g = &mgr->gateway;
    bool served = g->state == GATEWAY_SERVING && clock_ns() - g->ready_ns >= MGR_PROVEN_NS;

    g->child = NULL;
    if (g->state == GATEWAY_STOPPING) {
        g->listen_fd = fd_close(g->listen_fd);
        log_debug("gateway gone", "");
        return;
    }
    if (served)
        g->failures = 0;
    try_again(mgr, why);
}

static int start(struct mgr *mgr, struct error *err)
{
    static const struct child_handlers handlers = {0, gateway_message, gateway_exited};
    struct mgr_gateway *g = &mgr->gateway;

    if (g->listen_fd < 0) {
        int fd = address_listen(mgr->options.gateway_listen, err);
        if (fd < 0)
            return fd == -EADDRINUSE
                       ? error_set(err, EADDRINUSE,
                                   "%s is in use by another program; gateway_listen chooses "
                                   "another address, gateway = no goes without",
                                   mgr->options.gateway_listen)
                       : fd;
        g->listen_fd = fd;
        address_of(fd, g->address);
    }
    int r =
        child_start(mgr->base, "ember-gateway", "--from-emberd", &handlers, mgr, &g->child, err);
    if (r < 0)
        return r;
    g->state = GATEWAY_STARTING;
    g->starts++;
    child_deadline(g->child, READY_WITHIN_NS, "READY");
    send_start(mgr);
    return 0;
}

static void on_retry(int fd, short what, void *arg)
{
    struct mgr *mgr = arg;
    struct error err = {0};

    if (start(mgr, &err) < 0)
        try_again(mgr, &err);
}

void mgr_gateway_init(struct mgr *mgr)
{
    struct mgr_gateway *g = &mgr->gateway;
    static const struct timeval at_once = {0, 0};

    g->listen_fd = -1;
    event_assign(&g->on_retry, mgr->base, -1, 0, on_retry, mgr);
    if (!mgr->options.gateway)
        return;
    snprintf(g->address, sizeof g->address, "%s", mgr->options.gateway_listen);
    g->state = GATEWAY_WAITING;
    event_add(&g->on_retry, &at_once); /* behind READY=1: nobody waits for it */
}

void mgr_gateway_stop(struct mgr *mgr)
{
    struct mgr_gateway *g = &mgr->gateway;

    event_del(&g->on_retry);
    g->state = g->state == GATEWAY_OFF ? GATEWAY_OFF : GATEWAY_STOPPING;
    if (!g->child)
        g->listen_fd = fd_close(g->listen_fd);
    else
        child_stop(g->child, mgr->options.shutdown_timeout + KILL_SPARE_NS);
}

void mgr_gateway_free(struct mgr *mgr)
{
    if (event_initialized(&mgr->gateway.on_retry)) /* not so when the start failed */
        event_del(&mgr->gateway.on_retry);
    mgr->gateway.listen_fd = fd_close(mgr->gateway.listen_fd);
}

void mgr_gateway_describe(const struct mgr *mgr, Ember__V1__GatewayStatus *ret)
{
    static const char *const names[] = {
#define X(id, text) [id] = text,
        MGR_GATEWAY_STATES(X)
#undef X
    };
    const struct mgr_gateway *g = &mgr->gateway;

    ember__v1__gateway_status__init(ret);
    ret->state = (char *)names[g->state];
    ret->listen = (char *)g->address;
    ret->pid = g->child ? child_pid(g->child) : 0;
    ret->restarts = g->starts ? g->starts - 1 : 0;
    ret->error = (char *)g->error.text;
}
