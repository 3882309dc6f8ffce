/* SPDX-License-Identifier: Apache-2.0 */
/* Instances: STARTING → WARM ⇄ HOT → STOPPING → GONE. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fault.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "cache/cache.h"
#include "daemon/manager/manager.h"

static void check_invariants(const struct mgr_instance *i)
{
    bool ready = i->state == INSTANCE_WARM || i->state == INSTANCE_HOT;

    if ((*i->token != 0) != (i->state == INSTANCE_HOT) || (ready && !i->ready_ns) ||
        (i->child == NULL) != (i->state == INSTANCE_GONE)) {
        log_error("instance in an impossible state", "id=%s state=%d", i->id, i->state);
        abort();
    }
}

void mgr_instance_set_state(struct mgr_instance *i, enum instance_state state)
{
    static const unsigned from[] = {
#define X(id, warmth, allowed) [id] = allowed,
        MGR_INSTANCE_STATES(X)
#undef X
    };

    if (!(from[state] & BIT(i->state))) {
        log_error("impossible transition of an instance", "id=%s from=%d to=%d", i->id, i->state,
                  state);
        abort();
    }
    if (state != INSTANCE_HOT) {
        *i->token = 0;
        i->driver_connected = false;
        event_del(&i->on_lease_end);
    }
    i->model->instances[i->state]--;
    i->model->instances[state]++;
    i->state = state;
    if (state == INSTANCE_WARM)
        i->idle_ns = clock_ns();
    check_invariants(i);
    mgr_settle_soon(i->model->mgr);
}

struct mgr_instance *mgr_instance_find(struct mgr *mgr, const char *id)
{
    struct mgr_instance *i;

    TAILQ_FOREACH(i, &mgr->instances, link)
    if (!strcmp(i->id, id) && i->state != INSTANCE_GONE)
        return i;
    return NULL;
}

struct mgr_instance *mgr_instance_warm(struct mgr_model *model)
{
    struct mgr_instance *i, *best = NULL;

    if (!model->instances[INSTANCE_WARM])
        return NULL;
    TAILQ_FOREACH(i, &model->mgr->instances, link)
    if (i->model == model && i->state == INSTANCE_WARM && (!best || i->idle_ns > best->idle_ns))
        best = i;
    return best;
}

/* ---- the end ---- */

static void instance_free(struct mgr_instance *i)
{
    if (i->socket)
        unlink(i->socket);
    event_del(&i->on_lease_end);
    TAILQ_REMOVE(&i->model->mgr->instances, i, link);
    i->model->mgr->n_instances--;
    free(i->socket);
    free(i);
}

/*
 * Two crashes in a row at start: a stored artefact may be what crashes them. The cache is moved
 * aside, once in our life, so that the third start begins with an empty one.
 */
static void suspect_cache(struct mgr *mgr)
{
    struct error err = {0};

    if (mgr->cache_suspected)
        return;
    mgr->cache_suspected = true;
    if (cache_set_aside(mgr->options.cache_dir, &err) < 0)
        log_warn("cache not moved aside", "error=\"%s\"", err.text);
    else
        log_warn("cache moved aside: instances crash at their start", "dir=%s",
                 mgr->options.cache_dir);
}

static void start_failed(struct mgr_model *model, const struct error *why)
{
    if (why->code == -EFAULT && model->error.code == -EFAULT && model->failures)
        suspect_cache(model->mgr);
    model->error = *why;
    model->failures++;
    model->failed_ns = clock_ns();
    if (model->failures >= POOL_GIVE_UP)
        mgr_spawn_fail(model, model->n_waiting, why);
}

/* One that dies soon after READY, again and again, must not make the pool spin. */
static void note_lifetime(const struct mgr_instance *i)
{
    struct mgr_model *model = i->model;

    model->early_deaths = clock_ns() - i->ready_ns < MGR_PROVEN_NS ? model->early_deaths + 1 : 0;
    model->failed_ns = clock_ns();
}

static void instance_exited(void *owner, const struct error *why)
{
    struct mgr_instance *i = owner;
    struct mgr_model *model = i->model;
    struct error text = *why;
    bool stopped = i->state == INSTANCE_STOPPING && !i->failed;
    bool starting = i->state == INSTANCE_STARTING;

    i->child = NULL;
    mgr_instance_set_state(i, INSTANCE_GONE);
    if (stopped) {
        log_debug("instance gone", "id=%s model=%s", i->id, model->name);
    } else {
        error_prefix(&text, "instance %s of model %s", i->id, model->name);
        model->mgr->counters.instances_lost++;
        log_warn("instance lost", "id=%s model=%s pid=%d error=\"%s\"", i->id, model->name,
                 (int)i->pid, why->text);
    }
    mgr_event(i, EMBER__V1__INSTANCE_EVENT__KIND__GONE, stopped ? i->holder : why->text);
    if (starting && mgr_model_startable(model))
        start_failed(model, &text);
    else if (!stopped && !starting)
        note_lifetime(i);
    instance_free(i);
    mgr_model_check_left(model);
}

/* From STOPPING on, `holder` keeps the reason for the last event. */
void mgr_instance_stop(struct mgr_instance *i, const char *reason)
{
    if (i->state == INSTANCE_STOPPING || i->state == INSTANCE_GONE)
        return;
    mgr_instance_set_state(i, INSTANCE_STOPPING);
    snprintf(i->holder, sizeof i->holder, "%s", reason);
    child_stop(i->child, i->model->mgr->killing ? 0 : MGR_STOP_GRACE_NS);
}

void mgr_instance_stop_spares(struct mgr_model *model, uint32_t n, const char *reason)
{
    struct mgr_instance *i, *victim;

    for (; n; n--) {
        victim = NULL;
        TAILQ_FOREACH(i, &model->mgr->instances, link)
        {
            if (i->model != model || (i->state != INSTANCE_STARTING && i->state != INSTANCE_WARM))
                continue;
            if (!victim || i->state < victim->state ||
                (i->state == victim->state && i->idle_ns < victim->idle_ns))
                victim = i;
        }
        if (!victim)
            return;
        mgr_instance_stop(victim, reason);
    }
}

/* ---- messages ---- */

static void count_cache(struct mgr *mgr, const char *kind, const char *cause, uint64_t count)
{
    struct mgr_cache_count *c = mgr->cache_counts;
    size_t i = 0;

    if (!count)
        return;
    while (i < mgr->n_cache_counts && (strcmp(c[i].kind, kind) || strcmp(c[i].cause, cause)))
        i++;
    if (i == mgr->n_cache_counts && i >= MGR_CACHE_COUNTS_MAX - 1) {
        i = MGR_CACHE_COUNTS_MAX - 1;
        kind = cause = "other";
    }
    if (i == mgr->n_cache_counts) {
        mgr->n_cache_counts++;
        snprintf(c[i].kind, sizeof c[i].kind, "%s", kind);
        snprintf(c[i].cause, sizeof c[i].cause, "%s", cause);
        utf8_tame_line(c[i].kind);
        utf8_tame_line(c[i].cause);
    }
    c[i].count += count;
}

static void note_cache(struct mgr *mgr, const Ember__V1__CacheReport *report)
{
    if (!report)
        return;
    count_cache(mgr, "kernel", "", report->kernel_hits);
    count_cache(mgr, "graph", "", report->graph_hits);
    for (size_t i = 0; i < report->n_misses; i++)
        count_cache(mgr, report->misses[i]->kind,
                    *report->misses[i]->cause ? report->misses[i]->cause : "unknown",
                    report->misses[i]->count);
}

static void on_ready(struct mgr_instance *i, const Ember__V1__InstanceReady *ready)
{
    struct mgr_model *model = i->model;

    i->ready_ns = clock_ns();
    i->n_phases = MIN(ready->n_phases, MGR_PHASES_MAX);
    for (size_t k = 0; k < i->n_phases; k++) {
        snprintf(i->phases[k].name, sizeof i->phases[k].name, "%s", ready->phases[k]->name);
        i->phases[k].ms = ready->phases[k]->ms;
    }
    i->kernels_compiled = ready->kernels_compiled;
    i->graphs_captured = ready->graphs_captured;
    note_cache(model->mgr, ready->cache);
    if (ready->bytes) { /* bounded: a child's mistake must not poison the account */
        i->bytes = MIN(ready->bytes, mgr_budget(model->mgr));
        model->own_bytes = i->bytes;
    }
    model->failures = 0;
    model->error = (struct error){0};
    child_deadline(i->child, 0, NULL);
    mgr_instance_set_state(i, INSTANCE_WARM);
    log_info("instance ready", "id=%s model=%s pid=%d ms=%.1f bytes=%llu early=%s", i->id,
             model->name, (int)i->pid, (double)(i->ready_ns - i->started_ns) / 1e6,
             (unsigned long long)i->bytes, ready->early ? "yes" : "no");
    if (*ready->notice && strcmp(model->mgr->notice, ready->notice)) {
        snprintf(model->mgr->notice, sizeof model->mgr->notice, "%s", ready->notice);
        log_info("notice", "text=\"%s\"", model->mgr->notice);
    }
    mgr_event(i, EMBER__V1__INSTANCE_EVENT__KIND__READY, "");
    mgr_spawn_grant_all(model);
}

static void instance_message(void *owner, const uint8_t *data, size_t len, int *fds, size_t n_fds)
{
    struct mgr_instance *i = owner;
    Ember__V1__FromInstance *m = ember__v1__from_instance__unpack(NULL, len, data);
    bool understood = true;

    if (m && m->kind_case == EMBER__V1__FROM_INSTANCE__KIND_FAILED) {
        child_last_words(i->child, m->failed->error, "%s", m->failed->text);
    } else if (m && m->kind_case == EMBER__V1__FROM_INSTANCE__KIND_READY &&
               i->state == INSTANCE_STARTING) {
        on_ready(i, m->ready);
    } else if (m && m->kind_case == EMBER__V1__FROM_INSTANCE__KIND_DRIVER) {
        mgr_lease_driver(i, m->driver->connected, m->driver->token);
    } else if (m && m->kind_case == EMBER__V1__FROM_INSTANCE__KIND_BACKGROUND) {
        i->graphs_captured = m->background->graphs_captured;
        note_cache(i->model->mgr, m->background->cache);
    } else {
        understood = i->state == INSTANCE_STOPPING;
    }
    if (!understood) {
        child_last_words(i->child, EPROTO, "the instance sent what it may not send now");
        child_kill(i->child);
    }
    ember__v1__from_instance__free_unpacked(m, NULL);
}

/* ---- start ---- */

/* Listens before the process exists, so that whoever is told of the path may connect at once. */
static int listen_at(const char *path, struct error *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    _cleanup_fd_ int fd = -1;

    if (strlen(path) >= sizeof address.sun_path)
        return error_set(err, ENAMETOOLONG, "%s: too long for a socket; use a shorter runtime_dir",
                         path);
    memcpy(address.sun_path, path, strlen(path) + 1);
    fd = fault_hit(FAULT_FD) ? (errno = EMFILE, -1)
                             : socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return error_sys(err, errno, "cannot make a socket for an instance");
    unlink(path);
    mode_t before = umask(0177);
    int r = bind(fd, (struct sockaddr *)&address, sizeof address);
    int saved = errno;
    umask(before);
    if (r < 0)
        return error_sys(err, saved, "%s", path);
    if (listen(fd, 16) < 0) {
        r = error_sys(err, errno, "%s", path);
        unlink(path);
        return r;
    }
    return TAKE_FD(fd);
}

static int send_start(struct mgr_instance *i, int listener)
{
    const struct emberd_options *o = &i->model->mgr->options;
    const struct mgr_model *model = i->model;
    bool early = model->state == MODEL_LOADING;
    int fds[] = {early ? model->early_fds[0] : model->weights_fd,
                 early ? model->early_fds[1] : model->manifest_fd, listener, model->early_fds[2]};
    Ember__V1__InstanceStart start = EMBER__V1__INSTANCE_START__INIT;
    Ember__V1__ToInstance message = EMBER__V1__TO_INSTANCE__INIT;

    start.id = i->id;
    start.model = i->model->name;
    start.socket = i->socket;
    start.backend = o->backend;
    start.threads = (uint32_t)o->threads;
    start.pin = (uint32_t)o->pin;
    start.place = i->place;
    start.cache_dir = o->cache_dir;
    start.cache_limit = o->cache_limit;
    start.kv_bytes = mgr_model_kv_bytes(i->model);
    start.kv_kind = mgr_model_kv_kind(i->model);
    start.compile = o->compile != EMBERD_COMPILE_NEVER;
    start.forked_ns = child_forked_ns(i->child);
    start.cc = o->cc;
    message.kind_case = EMBER__V1__TO_INSTANCE__KIND_START;
    message.start = &start;
    start.early = early;
    return child_send(i->child, &message.base, fds, early ? 4 : 3);
}

static void on_lease_end(int fd, short what, void *arg)
{
    struct mgr_instance *i = arg;

    mgr_lease_release(i, i->driver_connected ? "lease ended" : "no driver connected in time");
}

static uint32_t free_place(struct mgr *mgr)
{
    _cleanup_free_ bool *taken = x_alloc((mgr->n_instances + 1) * sizeof *taken);
    struct mgr_instance *i;
    uint32_t place = 0;

    TAILQ_FOREACH(i, &mgr->instances, link)
    {
        if (i->place < mgr->n_instances)
            taken[i->place] = true;
    }
    while (taken[place])
        place++;
    return place;
}

int mgr_instance_start(struct mgr_model *model, struct error *err)
{
    static const struct child_handlers handlers = {0, instance_message, instance_exited};
    struct mgr *mgr = model->mgr;
    struct mgr_instance *i = x_alloc(sizeof *i);
    int r;

    i->model = model;
    i->place = free_place(mgr);
    snprintf(i->id, sizeof i->id, "i%04x-%llu", mgr->id_epoch, (unsigned long long)++mgr->ids);
    i->socket = x_printf("%s/instances/%s.sock", mgr->options.runtime_dir, i->id);
    i->bytes = mgr_model_instance_bytes(model);
    _cleanup_fd_ int listener = listen_at(i->socket, err);
    r = listener < 0
            ? listener
            : child_start(mgr->base, "ember-instance", i->id, &handlers, i, &i->child, err);
    if (r < 0) {
        if (listener >= 0)
            unlink(i->socket);
        free(i->socket);
        free(i);
        error_prefix(err, "model %s", model->name);
        start_failed(model, err);
        return r;
    }
    i->pid = child_pid(i->child);
    i->started_ns = i->idle_ns = child_forked_ns(i->child);
    i->state = INSTANCE_STARTING;
    model->instances[INSTANCE_STARTING]++;
    event_assign(&i->on_lease_end, mgr->base, -1, 0, on_lease_end, i);
    TAILQ_INSERT_TAIL(&mgr->instances, i, link);
    mgr->n_instances++;
    child_deadline(i->child, mgr->options.spawn_timeout, "READY");
    send_start(i, listener);
    mgr_event(i, EMBER__V1__INSTANCE_EVENT__KIND__STARTED, "");
    return 0;
}
