/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ember-gateway: start, the pump, signals, draining, stop.
 *
 * emberd starts it as "ember-gateway --from-emberd", with the link of daemon/link.h as descriptor
 * 3: options and the listening socket come over it, READY goes back, its end means: drain and exit.
 */
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <systemd/sd-daemon.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/gateway/beat.h"
#include "daemon/gateway/fleet.h"
#include "daemon/gateway/grammar.h"
#include "daemon/link.h"
#include "ember/v1/internal.pb-c.h"

#define HALF_NS UINT64_C(500000000)

static struct timeval timeval_of(uint64_t ns)
{
    return (struct timeval){(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};
}

/* ---- the pump ---- */

void gw_pump(struct gw *gw)
{
    if (gw->pump_due)
        return;
    gw->pump_due = true;
    event_active(gw->pump, EV_TIMEOUT, 0);
}

static void finish_draining(struct gw *gw)
{
    bool idle = !gw->n_jobs && !http_server_active(gw->http);

    if (gw->draining && (idle || clock_ns() >= gw->drain_until))
        event_base_loopbreak(gw->base);
}

/* The pump runs by then. A timer that runs out sooner is left alone: each step moves `next`. */
static void set_tick(struct gw *gw, uint64_t next)
{
    uint64_t now = clock_ns();

    if (next == UINT64_MAX || (gw->tick_ns > now && gw->tick_ns <= next))
        return;
    struct timeval tv = timeval_of(next > now ? next - now + 1000 : 1000);
    gw->tick_ns = MAX(next, now + 1000);
    event_add(gw->tick, &tv);
}

static void half_second(struct gw *gw, uint64_t now)
{
    if (!beat_due(gw->half, now))
        return;
    request_heartbeats(gw);
    fleet_check(gw);
    fleet_watch(gw);
}

static void on_pump(int fd, short what, void *arg)
{
    struct gw *gw = arg;
    uint64_t now = clock_ns(), next = UINT64_MAX, scale_next = UINT64_MAX;

    gw->pump_due = false;
    fleet_run(gw);
    sched_tick(gw->sched, now, &next);
    fleet_scale(gw, now, &scale_next);
    fleet_run(gw);
    half_second(gw, now);
    http_flush(gw->http); /* behind the next step: the instance must not wait for us */
    next = MIN(next, scale_next);
    set_tick(gw, next);
    finish_draining(gw);
}

/* ---- signals ---- */

static void drain(struct gw *gw)
{
    gw->draining = true;
    gw->drain_until = clock_ns() + gw->options.drain_timeout;
    log_info("shutting down", "requests=%u", gw->n_jobs);
    sd_notify(0, "STOPPING=1");
    fleet_drain(gw);
    gw_pump(gw);
}

static void on_stop(int fd, short what, void *arg)
{
    struct gw *gw = arg;

    if (gw->draining) /* asked twice: now */
        event_base_loopbreak(gw->base);
    else
        drain(gw);
}

/* ---- where the options come from ---- */

/* The words of the command line, or of emberd's last message. */
static struct {
    int argc;
    char **argv;
    ProtobufCMessage *owner; /* of argv's words, when they are emberd's */
    bool linked;
} source;

/* Takes over the options of a message as a command line. */
static void take_options(ProtobufCMessage *message, char **options, size_t n)
{
    char **argv = x_alloc((n + 2) * sizeof *argv);

    argv[0] = "ember-gateway";
    memcpy(argv + 1, options, n * sizeof *argv);
    if (source.owner) {
        protobuf_c_message_free_unpacked(source.owner, NULL);
        free(source.argv);
    }
    source.argc = (int)n + 1;
    source.argv = argv;
    source.owner = message;
}

static void differs(const struct config_key *key, void *context)
{
    if (key->change == CONFIG_RESTART)
        log_warn("configuration change needs a restart", "key=%s.%s", key->section, key->name);
    else
        log_info("configuration changed", "key=%s.%s", key->section, key->name);
}

static void reload(struct gw *gw)
{
    struct gateway_options fresh = {0};
    struct error err = {0};

    int r = config_read(&gateway_program, source.argc, source.argv, &fresh, &err);
    if (r == 0)
        config_reload(&gateway_program, &gw->options, &fresh, differs, NULL);
    config_free(&gateway_program, &fresh);
    if (r == 0)
        r = http_server_reload(gw->http, &err);
    if (r < 0)
        log_error("configuration not reloaded", "error=\"%s\"", err.text);
    else
        log_info("configuration reloaded", "");
    log_init("ember-gateway", log_level_of(gw->options.log_level));
}

static void on_reload(int fd, short what, void *arg)
{
    char text[64];

    snprintf(text, sizeof text, "RELOADING=1\nMONOTONIC_USEC=%llu",
             (unsigned long long)(clock_ns() / 1000));
    sd_notify(0, text);
    reload(arg);
    sd_notify(0, "READY=1");
}

/* ---- the link to emberd ---- */

static void say(const struct error *failed)
{
    Ember__V1__FromGateway message = EMBER__V1__FROM_GATEWAY__INIT;
    Ember__V1__GatewayReady ready = EMBER__V1__GATEWAY_READY__INIT;
    Ember__V1__ChildFailed words = EMBER__V1__CHILD_FAILED__INIT;

    if (!source.linked)
        return;
    message.kind_case =
        failed ? EMBER__V1__FROM_GATEWAY__KIND_FAILED : EMBER__V1__FROM_GATEWAY__KIND_READY;
    if (failed) {
        words.error = -failed->code;
        words.text = (char *)error_text(failed);
        message.failed = &words;
    } else {
        message.ready = &ready;
    }
    link_send(LINK_FD, &message.base, NULL, 0);
}

static int receive_start(int *ret_listen_fd, struct error *err)
{
    ProtobufCMessage *message;
    int fd = -1;
    size_t n_fds = 1;

    fcntl(LINK_FD, F_SETFD, FD_CLOEXEC);
    int r = link_recv(LINK_FD, &ember__v1__to_gateway__descriptor, &message, &fd, &n_fds);
    if (r != 0)
        return error_sys(err, r < 0 ? -r : EPROTO, "no options from emberd");
    const Ember__V1__ToGateway *to = (const void *)message;
    if (to->kind_case != EMBER__V1__TO_GATEWAY__KIND_START || n_fds != 1) {
        protobuf_c_message_free_unpacked(message, NULL);
        fd_close(fd);
        return error_set(err, EPROTO, "expected GatewayStart with a socket");
    }
    take_options(message, to->start->options, to->start->n_options);
    *ret_listen_fd = fd;
    return 0;
}

static void on_link(int fd, short what, void *arg)
{
    struct gw *gw = arg;
    ProtobufCMessage *message;
    size_t n_fds = 0;

    int r = link_recv(LINK_FD, &ember__v1__to_gateway__descriptor, &message, NULL, &n_fds);
    if (r == 1)
        return;
    if (r < 0) {
        event_del(gw->link);
        if (!gw->draining)
            drain(gw);
        return;
    }
    const Ember__V1__ToGateway *to = (const void *)message;
    if (to->kind_case != EMBER__V1__TO_GATEWAY__KIND_RELOAD) {
        protobuf_c_message_free_unpacked(message, NULL);
        return;
    }
    take_options(message, to->reload->options, to->reload->n_options);
    reload(gw);
}

static void watch_link(struct gw *gw)
{
    if (!source.linked)
        return;
    fcntl(LINK_FD, F_SETFL, fcntl(LINK_FD, F_GETFL) | O_NONBLOCK);
    gw->link = event_new(gw->base, LINK_FD, EV_READ | EV_PERSIST, on_link, gw);
    event_add(gw->link, NULL);
}

/* ---- start and end ---- */

static int make_scheduler(struct gw *gw, struct error *err)
{
    struct sched_config config = {.event = request_event, .context = gw};

    if (getrandom(&config.hash_seed, sizeof config.hash_seed, 0) != sizeof config.hash_seed)
        return error_set(err, EIO, "no random numbers");
    return sched_new(&config, &gw->sched, err);
}

/* Without a cache tokenizers are parsed, which only takes longer. */
static void open_cache(struct gw *gw)
{
    struct error err = {0};
    const char *warning;

    if (*gw->options.cache_dir && cache_open(gw->options.cache_dir, NULL, &gw->cache, &err) < 0)
        log_warn("no cache: tokenizers are parsed at each start", "error=\"%s\"", err.text);
    if (gw->cache && cache_warnings(gw->cache, &warning))
        log_warn("artefact cache", "warning=\"%s\"", warning);
}

/* What a socket's events change to and back within one turn costs no system call. No descriptor of
 * the loop is a copy of another, which would be in the way of that. */
static struct event_base *new_base(void)
{
    struct event_config *config = event_config_new();
    struct event_base *base = NULL;

    if (config && event_config_set_flag(config, EVENT_BASE_FLAG_EPOLL_USE_CHANGELIST) == 0)
        base = event_base_new_with_config(config);
    if (config)
        event_config_free(config);
    return base;
}

static int start(struct gw *gw, int listen_fd, struct error *err)
{
    gw->base = new_base();
    if (!gw->base)
        return error_set(err, ENOMEM, "no event loop");
    gw->pump = event_new(gw->base, -1, 0, on_pump, gw);
    gw->tick = event_new(gw->base, -1, 0, on_pump, gw);
    gw->half = beat_new(gw->base, HALF_NS, on_pump, gw);
    if (!gw->pump || !gw->tick || !gw->half)
        return error_set(err, ENOMEM, "no memory for the loop's timers");
    open_cache(gw);
    int r = make_scheduler(gw, err);
    gw->grammars = grammar_cache_new((size_t)gw->options.grammar_cache);
    if (r == 0)
        r = work_pool_new(gw->base, (unsigned)gw->options.workers, &gw->work, err);
    if (r == 0)
        r = work_pool_new(gw->base, (unsigned)gw->options.workers, &gw->compilers, err);
    if (r == 0)
        r = http_server_new(gw->base, &gw->options, TAKE_FD(listen_fd), request_handle, gw,
                            &gw->http, err);
    fd_close(listen_fd);
    if (r == 0)
        r = fleet_new(gw, err);
    if (r == 0)
        gw_pump(gw);
    return r;
}

static void finish(struct gw *gw)
{
    work_pool_free(gw->work); /* before what its work points to, and what takes it over */
    work_pool_free(gw->compilers);
    fleet_free(gw->fleet);
    sched_free(gw->sched);
    http_server_free(gw->http);
    struct event *events[] = {gw->pump, gw->tick, gw->link};
    for (size_t i = 0; i < ARRAY_LEN(events); i++)
        if (events[i])
            event_free(events[i]);
    beat_free(gw->half);
    if (gw->base)
        event_base_free(gw->base);
    grammar_cache_free(gw->grammars);
    cache_close(gw->cache);
    config_free(&gateway_program, &gw->options);
    if (source.owner) {
        protobuf_c_message_free_unpacked(source.owner, NULL);
        free(source.argv);
    }
}

static int run(struct gw *gw, int listen_fd)
{
    static const struct {
        int number;
        event_callback_fn handler;
    } table[] = {{SIGTERM, on_stop}, {SIGINT, on_stop}, {SIGHUP, on_reload}};
    struct event *signals[ARRAY_LEN(table)];
    struct error err = {0};

    if (start(gw, listen_fd, &err) < 0) {
        log_error("cannot start", "error=\"%s\"", err.text);
        say(&err);
        return 1;
    }
    for (size_t i = 0; i < ARRAY_LEN(table); i++) {
        signals[i] = evsignal_new(gw->base, table[i].number, table[i].handler, gw);
        evsignal_add(signals[i], NULL);
    }
    watch_link(gw);
    sd_notify(0, "READY=1");
    say(NULL);
    const char *address = http_server_address(gw->http);
    log_info("ready", "listen=%s port=%s", address, strrchr(address, ':') + 1);
    event_base_dispatch(gw->base);
    for (size_t i = 0; i < ARRAY_LEN(table); i++)
        event_free(signals[i]);
    log_info("ended", "requests=%u", gw->n_jobs);
    return 0;
}

int main(int argc, char **argv)
{
    struct gw gw = {.started = time(NULL)};
    struct error err = {0};
    int listen_fd = -1, action = 0;

    TAILQ_INIT(&gw.models);
    TAILQ_INIT(&gw.replaced);
    TAILQ_INIT(&gw.jobs);
    /* What a large reply takes is kept for the next one: pages from the system cost a fault each.
     */
    mallopt(M_MMAP_THRESHOLD, 2 << 20);
    mallopt(M_TRIM_THRESHOLD, 4 << 20);
    fd_hold_stdio();
    fd_raise_limit();
    signal(SIGPIPE, SIG_IGN);
    log_init("ember-gateway", LOG_LEVEL_INFO);
    json_object_seed(0);
    source.argc = argc;
    source.argv = argv;
    source.linked = argc == 2 && !strcmp(argv[1], "--from-emberd");
    if (source.linked)
        action = receive_start(&listen_fd, &err);
    if (action == 0)
        action = config_read(&gateway_program, source.argc, source.argv, &gw.options, &err);
    if (action < 0) {
        fprintf(stderr, "ember-gateway: %s\n", err.text);
        say(&err);
        return 2;
    }
    if (action != CONFIG_RUN) {
        struct buffer out = {0};
        config_print(&gateway_program, action, &gw.options, &out);
        fwrite(out.data, 1, out.len, stdout);
        buffer_free(&out);
        config_free(&gateway_program, &gw.options);
        return 0;
    }
    log_init("ember-gateway", log_level_of(gw.options.log_level));
    int code = run(&gw, listen_fd);
    finish(&gw);
    return code;
}
