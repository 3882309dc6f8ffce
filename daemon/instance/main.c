/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ember-instance: one model, warm, on one device. emberd starts it, pushes its configuration with
 * the weights' descriptors over the link, and hears READY when the canary has passed. From then on
 * it serves the driver that holds the lease, one step at a time, and adopts further graphs when
 * nobody waits, or when that never happens. It decides nothing. When the link closes it exits.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/log.h"
#include "cache/cache.h"
#include "daemon/instance/driver.h"
#include "daemon/instance/grammars.h"
#include "daemon/link.h"
#include "ember/v1/internal.pb-c.h"

enum { START_WEIGHTS, START_MANIFEST, START_LISTENER, START_FDS, START_FILLING = START_FDS };
#define START_FDS_EARLY (START_FDS + 1)

struct instance {
    Ember__V1__ToInstance *start_message;
    const Ember__V1__InstanceStart *start;
    int fds[START_FDS_EARLY];
    struct cache *cache;
    struct engine *engine;
    struct engine_start said; /* what emberd has heard of it */
    struct drivers drivers;
    double exec_ms;
    uint64_t put_off_ns; /* since when graphs have had to wait for steps; 0: never */
    bool done;
};

static void say(Ember__V1__FromInstance *message)
{
    if (link_send(LINK_FD, &message->base, NULL, 0) < 0)
        _exit(0); /* emberd has gone, and so do we */
}

static int fail(const struct error *err)
{
    Ember__V1__ChildFailed failed = EMBER__V1__CHILD_FAILED__INIT;
    Ember__V1__FromInstance from = EMBER__V1__FROM_INSTANCE__INIT;

    failed.error = -err->code;
    failed.text = (char *)error_text(err);
    from.kind_case = EMBER__V1__FROM_INSTANCE__KIND_FAILED;
    from.failed = &failed;
    say(&from);
    return 1;
}

static int receive_start(struct instance *instance, struct error *err)
{
    size_t n_fds = START_FDS_EARLY;
    ProtobufCMessage *message;

    int r =
        link_recv(LINK_FD, &ember__v1__to_instance__descriptor, &message, instance->fds, &n_fds);
    if (r != 0)
        return error_sys(err, r < 0 ? -r : EPROTO, "no configuration from emberd");
    instance->start_message = (Ember__V1__ToInstance *)message;
    instance->start = instance->start_message->start;
    if (instance->start_message->kind_case != EMBER__V1__TO_INSTANCE__KIND_START)
        return error_set(err, EPROTO, "expected InstanceStart first");
    size_t want = instance->start->early ? START_FDS_EARLY : START_FDS;
    return n_fds == want
               ? 0
               : error_set(err, EPROTO, "InstanceStart with %zu descriptors, not %zu", n_fds, want);
}

/* The environment tells the backend which compiler to use; see kernels/cpu/compile.c. */
static void choose_compiler(const Ember__V1__InstanceStart *start)
{
    if (start->cc && *start->cc)
        setenv("EMBER_CC", start->cc, 1);
}

static int open_engine(struct instance *instance, struct error *err)
{
    const Ember__V1__InstanceStart *start = instance->start;
    struct cache_options cache_options = {.limit = start->cache_limit};
    struct error cache_error = {0};

    choose_compiler(start);
    /* A cache that cannot be used costs time, not service. */
    if (*start->cache_dir &&
        cache_open(start->cache_dir, &cache_options, &instance->cache, &cache_error) < 0)
        log_warn("going on without the cache", "reason=\"%s\"", error_text(&cache_error));
    struct engine_options options = {.backend = *start->backend ? start->backend : NULL,
                                     .threads = start->threads,
                                     .pin = start->pin,
                                     .place = start->place,
                                     .cache = instance->cache,
                                     .compile = start->compile,
                                     .weights = instance->fds[START_WEIGHTS],
                                     .manifest = instance->fds[START_MANIFEST],
                                     .early = start->early,
                                     .filling = instance->fds[START_FILLING],
                                     .kv = (enum kv_kind)start->kv_kind,
                                     .kv_bytes = start->kv_bytes};
    return engine_open(&options, &instance->engine, err);
}

static void add_phase(Ember__V1__PhaseTime *phase, const char *name, double ms)
{
    ember__v1__phase_time__init(phase);
    phase->name = (char *)name;
    phase->ms = ms;
}

/* What the cache had and had not since the last report. */
struct report {
    Ember__V1__CacheReport message;
    Ember__V1__CacheMiss misses[ENGINE_MISSES_MAX], *list[ENGINE_MISSES_MAX];
};

static Ember__V1__CacheReport *report_cache(struct instance *instance, struct report *report)
{
    const struct engine_start *now = engine_started(instance->engine);
    struct engine_start *said = &instance->said;
    Ember__V1__CacheReport *m = &report->message;

    ember__v1__cache_report__init(m);
    m->kernel_hits = now->kernels_cached - said->kernels_cached;
    m->graph_hits = now->graphs_restored - said->graphs_restored;
    m->misses = report->list;
    for (size_t i = 0; i < now->n_misses; i++) {
        uint32_t before = i < said->n_misses ? said->misses[i].n : 0;
        Ember__V1__CacheMiss *miss = &report->misses[m->n_misses];
        if (now->misses[i].n == before)
            continue;
        ember__v1__cache_miss__init(miss);
        miss->kind = (char *)cache_kind_name(now->misses[i].kind);
        miss->cause = (char *)now->misses[i].why.cause;
        miss->count = now->misses[i].n - before;
        report->list[m->n_misses++] = miss;
        /* Something like it was there: whoever wonders why this start took longer reads it. */
        if (strcmp(miss->cause, "absent"))
            log_info("made anew", "kind=%s n=%u why=\"%s\"", miss->kind, miss->count,
                     now->misses[i].why.text);
    }
    *said = *now;
    return m;
}

static void say_ready(struct instance *instance)
{
    const struct engine_start *s = engine_started(instance->engine);
    Ember__V1__PhaseTime phases[5], *list[5];
    struct report report;
    Ember__V1__InstanceReady ready = EMBER__V1__INSTANCE_READY__INIT;
    Ember__V1__FromInstance from = EMBER__V1__FROM_INSTANCE__INIT;

    add_phase(&phases[0], "exec", instance->exec_ms);
    add_phase(&phases[1], "attach", s->attach_ms);
    add_phase(&phases[2], "kernels", s->kernels_ms);
    add_phase(&phases[3], "graphs", s->graphs_ms);
    add_phase(&phases[4], "canary", s->canary_ms);
    for (int i = 0; i < 5; i++)
        list[i] = &phases[i];
    ready.phases = list;
    ready.n_phases = 5;
    ready.bytes = engine_limits(instance->engine).bytes;
    ready.kernels_compiled = s->kernels_compiled;
    ready.graphs_captured = s->graphs_captured;
    ready.notice = (char *)s->notice;
    if (!*ready.notice && instance->cache)
        cache_warnings(instance->cache, (const char **)&ready.notice);
    ready.cache = report_cache(instance, &report);
    ready.early = engine_early(instance->engine);
    from.kind_case = EMBER__V1__FROM_INSTANCE__KIND_READY;
    from.ready = &ready;
    say(&from);
}

static void driver_changed(void *ctx, bool connected)
{
    struct instance *instance = ctx;
    Ember__V1__DriverState state = EMBER__V1__DRIVER_STATE__INIT;
    Ember__V1__FromInstance from = EMBER__V1__FROM_INSTANCE__INIT;

    state.connected = connected;
    state.token = instance->drivers.lease;
    from.kind_case = EMBER__V1__FROM_INSTANCE__KIND_DRIVER;
    from.driver = &state;
    say(&from);
}

static void obey(struct instance *instance, const Ember__V1__ToInstance *message)
{
    switch (message->kind_case) {
    case EMBER__V1__TO_INSTANCE__KIND_GRANT:
        drivers_end_lease(&instance->drivers);
        snprintf(instance->drivers.lease, sizeof instance->drivers.lease, "%s",
                 message->grant->token);
        break;
    case EMBER__V1__TO_INSTANCE__KIND_END:
        drivers_end_lease(&instance->drivers);
        break;
    default:
        log_warn("unexpected message from emberd", "kind=%d", (int)message->kind_case);
    }
}

/* Takes all that emberd has sent. */
static void read_link(void *ctx)
{
    struct instance *instance = ctx;

    for (;;) {
        ProtobufCMessage *message;
        size_t n_fds = 0;
        int r = link_recv(LINK_FD, &ember__v1__to_instance__descriptor, &message, NULL, &n_fds);
        if (r < 0)
            instance->done = true;
        if (r != 0)
            return;
        obey(instance, (const Ember__V1__ToInstance *)message);
        protobuf_c_message_free_unpacked(message, NULL);
    }
}

/* A step, a new driver or emberd wants attention. */
static bool somebody_waits(void *ctx)
{
    struct instance *instance = ctx;
    struct pollfd fds[DRIVER_CONNECTIONS + 2] = {
        {.fd = LINK_FD, .events = POLLIN},
        {.fd = instance->fds[START_LISTENER], .events = POLLIN},
    };
    size_t n = 2 + drivers_poll(&instance->drivers, fds + 2);

    return poll(fds, n, 0) > 0;
}

static void adopt(struct instance *instance, bool at_once)
{
    struct error err = {0};
    int r = engine_adopt(instance->engine, at_once ? NULL : somebody_waits, instance, &err);

    if (r < 0 && !engine_broken(instance->engine))
        log_warn("a graph was dropped", "instance=%s reason=\"%s\"", instance->start->id,
                 error_text(&err));
    if (!engine_settled(instance->engine))
        return;
    const struct engine_start *s = engine_started(instance->engine);
    struct report report;
    Ember__V1__InstanceBackground background = EMBER__V1__INSTANCE_BACKGROUND__INIT;
    Ember__V1__FromInstance from = EMBER__V1__FROM_INSTANCE__INIT;
    background.graphs_captured = s->graphs_captured;
    background.graphs_restored = s->graphs_restored;
    background.cache = report_cache(instance, &report);
    from.kind_case = EMBER__V1__FROM_INSTANCE__KIND_BACKGROUND;
    from.background = &background;
    say(&from);
}

/*
 * One turn: a waiting step comes before everything that can wait. Graphs cannot wait for ever: a
 * driver that always has another step would be kept to the first one, with its few tokens a step.
 */
#define PUT_OFF_NS UINT64_C(1000000000)

static void turn(struct instance *instance)
{
    struct pollfd fds[DRIVER_CONNECTIONS + 3] = {
        {.fd = LINK_FD, .events = POLLIN},
        {.fd = instance->fds[START_LISTENER], .events = POLLIN},
        {.fd = engine_settled(instance->engine) ? -1 : engine_background_fd(instance->engine),
         .events = POLLIN},
    };
    size_t n = 3 + drivers_poll(&instance->drivers, fds + 3);
    int timeout = drivers_expire(&instance->drivers), pending;
    bool served = false;

    if (drivers_pending(&instance->drivers, &pending))
        timeout = 0;
    else
        pending = -1;
    if (poll(fds, n, timeout) < 0)
        return;
    if (fds[0].revents)
        read_link(instance);
    if (pending >= 0)
        drivers_serve(&instance->drivers, pending);
    for (size_t i = 3; i < n; i++) {
        if (!fds[i].revents || fds[i].fd == pending)
            continue;
        drivers_serve(&instance->drivers, fds[i].fd);
        served = true;
    }
    if (fds[1].revents)
        drivers_accept(&instance->drivers, instance->fds[START_LISTENER]);
    if (!fds[2].revents)
        return;
    bool idle = !served && pending < 0;
    if (!idle && !instance->put_off_ns)
        instance->put_off_ns = clock_ns();
    bool at_once = instance->put_off_ns && clock_ns() - instance->put_off_ns > PUT_OFF_NS;
    if (idle || at_once)
        adopt(instance, at_once);
}

static int serve(struct instance *instance)
{
    struct error err = {0};

    instance->drivers = (struct drivers){
        .engine = instance->engine,
        .grammars = grammars_new(instance->cache, engine_source_dir(instance->engine),
                                 engine_model(instance->engine)->vocab_size),
        .instance_id = instance->start->id,
        .model = instance->start->model,
        .changed = driver_changed,
        .refresh = read_link,
        .ctx = instance};
    drivers_init(&instance->drivers);
    fcntl(LINK_FD, F_SETFL, fcntl(LINK_FD, F_GETFL) | O_NONBLOCK);
    fcntl(instance->fds[START_LISTENER], F_SETFL,
          fcntl(instance->fds[START_LISTENER], F_GETFL) | O_NONBLOCK);
    fault_hit(FAULT_INSTANCE_READY);
    say_ready(instance);
    if (engine_background(instance->engine, &err) < 0)
        log_warn("only the first graph is available", "reason=\"%s\"", error_text(&err));
    while (!instance->done && !engine_broken(instance->engine))
        turn(instance);
    drivers_free(&instance->drivers);
    grammars_free(instance->drivers.grammars);
    return engine_broken(instance->engine) ? fail(engine_broken(instance->engine)) : 0;
}

int main(int argc, char **argv)
{
    struct instance instance = {.fds = {-1, -1, -1, -1}};
    struct error err = {0};
    uint64_t entered = clock_ns();

    signal(SIGPIPE, SIG_IGN);
    fcntl(LINK_FD, F_SETFD, FD_CLOEXEC); /* a compiler that we start is not emberd's child */
    log_init("ember-instance", LOG_LEVEL_INFO);
    int r = receive_start(&instance, &err);
    if (r < 0) {
        fprintf(stderr, "ember-instance is started by emberd (%s); to have one: emberctl spawn\n",
                error_text(&err));
        return 2;
    }
    if (instance.start->forked_ns && instance.start->forked_ns < entered)
        instance.exec_ms = (double)(entered - instance.start->forked_ns) / 1e6;
    r = open_engine(&instance, &err);
    int status = r < 0 ? fail(&err) : serve(&instance);
    engine_free(instance.engine);
    cache_close(instance.cache);
    ember__v1__to_instance__free_unpacked(instance.start_message, NULL);
    return status;
}
