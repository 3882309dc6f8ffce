/* SPDX-License-Identifier: Apache-2.0 */
/* ember-gateway: start, the pump, signals, draining, stop. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <systemd/sd-daemon.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/gateway/gateway.h"

#define SECOND_EVERY_US 500000
#define LIST_EVERY 4 /* of those half seconds */

static struct timeval timeval_of(uint64_t ns)
{
    return (struct timeval){(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};
}

/* ---- the pump ---- */

void gw_pump(struct gw *gw)
{
    event_active(gw->pump, EV_TIMEOUT, 0);
}

static void finish_draining(struct gw *gw)
{
    bool idle = !gw->n_jobs && !http_server_active(gw->http);

    if (gw->draining && (idle || clock_ns() >= gw->drain_until))
        event_base_loopbreak(gw->base);
}

static void on_pump(int fd, short what, void *arg)
{
    struct gw *gw = arg;
    uint64_t now = clock_ns(), next = UINT64_MAX, scale_next = UINT64_MAX;

    fleet_run(gw);
    sched_tick(gw->sched, now, &next);
    fleet_scale(gw, now, &scale_next);
    fleet_run(gw);
    next = MIN(next, scale_next);
    if (next != UINT64_MAX) {
        now = clock_ns();
        struct timeval tv = timeval_of(next > now ? next - now + 1000 : 1000);
        event_add(gw->tick, &tv);
    }
    finish_draining(gw);
}

static void on_second(int fd, short what, void *arg)
{
    static unsigned turns;
    struct gw *gw = arg;

    request_heartbeats(gw);
    fleet_check(gw);
    if (turns++ % LIST_EVERY == 0 || !fleet_connected(gw))
        fleet_list(gw);
    gw_pump(gw);
}

/* ---- signals ---- */

static void on_stop(int fd, short what, void *arg)
{
    struct gw *gw = arg;

    if (gw->draining) { /* asked twice: now */
        event_base_loopbreak(gw->base);
        return;
    }
    gw->draining = true;
    gw->drain_until = clock_ns() + gw->options.drain_timeout;
    log_info("shutting down", "requests=%u", gw->n_jobs);
    sd_notify(0, "STOPPING=1");
    gw_pump(gw);
}

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

    if (*gw->options.cache_dir && cache_open(gw->options.cache_dir, NULL, &gw->cache, &err) < 0)
        log_warn("no cache: tokenizers are parsed at each start", "error=\"%s\"", err.text);
}

static int start(struct gw *gw, struct error *err)
{
    struct timeval half = {0, SECOND_EVERY_US};

    gw->base = event_base_new();
    if (!gw->base)
        return error_set(err, ENOMEM, "no event loop");
    gw->pump = event_new(gw->base, -1, 0, on_pump, gw);
    gw->tick = event_new(gw->base, -1, 0, on_pump, gw);
    gw->second = event_new(gw->base, -1, EV_PERSIST, on_second, gw);
    open_cache(gw);
    int r = make_scheduler(gw, err);
    if (r == 0)
        r = work_pool_new(gw->base, (unsigned)gw->options.workers, &gw->work, err);
    if (r == 0)
        r = http_server_new(gw->base, &gw->options, request_handle, gw, &gw->http, err);
    if (r == 0)
        r = fleet_new(gw, err);
    if (r == 0)
        event_add(gw->second, &half);
    return r;
}

static void finish(struct gw *gw)
{
    if (gw->work)
        work_pool_free(gw->work); /* before what its work points to */
    fleet_free(gw->fleet);
    sched_free(gw->sched);
    http_server_free(gw->http);
    struct event *events[] = {gw->pump, gw->tick, gw->second};
    for (size_t i = 0; i < ARRAY_LEN(events); i++)
        if (events[i])
            event_free(events[i]);
    if (gw->base)
        event_base_free(gw->base);
    cache_close(gw->cache);
    config_free(&gateway_program, &gw->options);
}

static int run(struct gw *gw)
{
    static const int numbers[] = {SIGTERM, SIGINT};
    struct event *signals[ARRAY_LEN(numbers)];
    struct error err = {0};

    if (start(gw, &err) < 0) {
        log_error("cannot start", "error=\"%s\"", err.text);
        return 1;
    }
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++) {
        signals[i] = evsignal_new(gw->base, numbers[i], on_stop, gw);
        evsignal_add(signals[i], NULL);
    }
    sd_notify(0, "READY=1");
    log_info("ready", "listen=%s port=%u", gw->options.listen, http_server_port(gw->http));
    event_base_dispatch(gw->base);
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        event_free(signals[i]);
    log_info("ended", "requests=%u", gw->n_jobs);
    return 0;
}

int main(int argc, char **argv)
{
    struct gw gw = {.started_ns = clock_ns()};
    struct error err = {0};

    TAILQ_INIT(&gw.models);
    TAILQ_INIT(&gw.jobs);
    fd_hold_stdio();
    fd_raise_limit();
    signal(SIGPIPE, SIG_IGN);
    log_init("ember-gateway", LOG_LEVEL_INFO);
    json_object_seed(0);
    int action = config_read(&gateway_program, argc, argv, &gw.options, &err);
    if (action < 0) {
        fprintf(stderr, "ember-gateway: %s\n", err.text);
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
    log_init("ember-gateway", gateway_log_level(&gw.options));
    int code = run(&gw);
    finish(&gw);
    return code;
}
