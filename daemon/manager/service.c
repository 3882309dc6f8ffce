/* SPDX-License-Identifier: Apache-2.0 */
/* The RPCs of ember.v1.Ember: requests checked, facts changed or read, replies built. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "daemon/manager/manager.h"

#define PROGRESS_EVERY_NS UINT64_C(50000000)
#define PROGRESS_QUEUE_MOST (64 * KIB)
#define STANDBY_MOST 256

extern const uint8_t ember_v1_ember_protoset[];
extern const size_t ember_v1_ember_protoset_size;

/* ---- failing ---- */

/*
 * A child that died, could not be started or kept nobody informed is UNAVAILABLE: the next try may
 * do better. Being out of descriptors is RESOURCE_EXHAUSTED. What a child says of the checkpoint
 * (ENOENT, EINVAL, EBADMSG, ENOTSUP, ENOMEM, EACCES) passes as it is.
 */
void mgr_call_fail(struct grpc_call *call, const struct error *err)
{
    struct error out = *err;

    switch (-err->code) {
    case EMFILE:
    case ENFILE:
    case ENOSPC:
        out.code = -ENOMEM;
        break;
    case ENOTDIR:
        out.code = -ENOENT;
        break;
    case EEXIST: /* the API's word for a name that is taken */
    case EBUSY:
        out.code = -ESTALE;
        break;
    case EFBIG: /* a file that is not what its name says */
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case E2BIG: /* numbers beyond any sense */
    case EOVERFLOW:
    case ERANGE:
        out.code = -EINVAL;
        break;
    case EDQUOT: /* more than the budget will ever have */
        out.code = -EOVERFLOW;
        break;
    case EILSEQ:
        out.code = -EBADMSG;
        break;
    case EPERM:
        out.code = -EACCES;
        break;
    case ENOENT:
    case EINVAL:
    case EBADMSG:
    case ENOTSUP:
    case ENOMEM:
    case EACCES:
    case EAGAIN:
    case ESTALE:
        break;
    default:
        out.code = -EAGAIN;
    }
    grpc_call_fail(call, &out);
}

void mgr_call_refuse(struct grpc_call *call, int errnum, const char *format, ...)
{
    struct error err;
    va_list ap;

    va_start(ap, format);
    error_setv(&err, errnum, format, ap);
    va_end(ap);
    mgr_call_fail(call, &err);
}

/* ---- watches: LoadModel streams and UnloadModel calls ---- */

static void watch_free(struct mgr_watches *list, struct mgr_watch *w)
{
    TAILQ_REMOVE(list, w, link);
    free(w);
}

/* The caller has gone; what it asked for goes on. */
static void load_cancelled(struct grpc_call *call, void *user)
{
    struct mgr_watch *w = user;
    watch_free(&w->model->loads, w);
}

static void unload_cancelled(struct grpc_call *call, void *user)
{
    struct mgr_watch *w = user;
    watch_free(&w->model->unloads, w);
}

static struct mgr_watch *watch_new(struct mgr_model *m, struct grpc_call *call)
{
    struct mgr_watch *w = x_alloc(sizeof *w);

    w->model = m;
    w->call = call;
    return w;
}

static void send_progress(struct mgr_model *m, struct grpc_call *call, const char *phase,
                          Ember__V1__Model *last)
{
    Ember__V1__LoadProgress progress = EMBER__V1__LOAD_PROGRESS__INIT;

    progress.warmth = last                        ? last->warmth
                      : m->state == MODEL_LOADING ? EMBER__V1__WARMTH__LOADING
                      : m->state == MODEL_PARKED  ? EMBER__V1__WARMTH__PARKED
                                                  : EMBER__V1__WARMTH__COLD;
    progress.phase = (char *)phase;
    progress.bytes_done = m->bytes_done;
    progress.bytes_total = m->weights_bytes;
    progress.model = last;
    grpc_call_send(call, &progress.base);
}

void mgr_watch_progress(struct mgr_model *m, bool force)
{
    uint64_t now = clock_ns();
    struct mgr_watch *w;

    TAILQ_FOREACH(w, &m->loads, link)
    {
        if (!force && now - w->sent_ns < PROGRESS_EVERY_NS)
            continue;
        if (grpc_call_queued(w->call) > PROGRESS_QUEUE_MOST)
            continue;
        w->sent_ns = now;
        send_progress(m, w->call, m->phase, NULL);
    }
}

static void finish_load(struct mgr_model *m, struct grpc_call *call)
{
    Ember__V1__Model model;

    mgr_describe_model(m, &model);
    m->bytes_done = m->weights_bytes;
    send_progress(m, call, "ready", &model);
    grpc_call_finish(call, GRPC_OK, NULL);
}

void mgr_watch_loaded(struct mgr_model *m, const struct error *why)
{
    while (!TAILQ_EMPTY(&m->loads)) {
        struct mgr_watch *w = TAILQ_FIRST(&m->loads);
        struct grpc_call *call = w->call;
        watch_free(&m->loads, w);
        if (why) {
            mgr_call_fail(call, why);
            continue;
        }
        if (mgr_model_target(m))
            send_progress(m, call, "starting standbys", NULL);
        finish_load(m, call);
    }
}

void mgr_watch_unloaded(struct mgr_model *m)
{
    Ember__V1__UnloadModelResponse response = EMBER__V1__UNLOAD_MODEL_RESPONSE__INIT;

    while (!TAILQ_EMPTY(&m->unloads)) {
        struct mgr_watch *w = TAILQ_FIRST(&m->unloads);
        struct grpc_call *call = w->call;
        response.bytes_freed = w->bytes;
        watch_free(&m->unloads, w);
        grpc_call_reply(call, &response.base);
    }
}

/* ---- models ---- */

/* The model that a request means, registered if it is new. */
static int load_target(struct mgr *mgr, const Ember__V1__LoadModelRequest *request,
                       struct mgr_model **ret, struct error *err)
{
    _cleanup_free_ char *path = NULL;
    char name[MGR_NAME_MAX + 1];
    int r;

    if (!*request->path) {
        *ret = mgr_model_find(mgr, request->name);
        return *ret ? 0
                    : error_set(err, ENOENT, "no model is called \"%.*s\"; give its path",
                                MGR_NAME_MAX, request->name);
    }
    r = mgr_model_path_check(request->path, &path, err);
    if (r == 0 && !*request->name)
        r = mgr_model_name_of(path, name, err);
    if (r < 0)
        return r;
    return mgr_model_register(mgr, *request->name ? request->name : name, path, ret, err);
}

static bool asks_standby(const Ember__V1__LoadModelRequest *request)
{
    return request->standby_asked_case == EMBER__V1__LOAD_MODEL_REQUEST__STANDBY_ASKED_STANDBY;
}

/* What a load asks of KV, for the instances from now on. */
static int set_kv(struct mgr_model *m, const Ember__V1__LoadModelRequest *request,
                  struct error *err)
{
    int before = m->kv_kind;
    enum kv_kind kind;

    if (*request->kv_type) {
        int r = kv_kind_find(request->kv_type, &kind, err);
        if (r < 0)
            return r;
        m->kv_kind = (int)kind;
    }
    if (!*request->kv_type && !request->kv_bytes)
        return 0;
    /* What was asked for before has to hold a page of the new kind as well. */
    int r = mgr_model_kv_check(m, request->kv_bytes ? request->kv_bytes : m->kv_asked, err);
    if (r < 0)
        return r;
    if (m->kv_kind != before || (request->kv_bytes && request->kv_bytes != m->kv_asked))
        m->own_bytes = 0;
    if (request->kv_bytes)
        m->kv_asked = request->kv_bytes;
    return 0;
}

/* A request that is refused changes nothing. */
static int set_form(struct mgr_model *m, const Ember__V1__LoadModelRequest *request,
                    struct error *err)
{
    uint64_t kv_asked = m->kv_asked, own_bytes = m->own_bytes;
    int kv_kind = m->kv_kind, r = set_kv(m, request, err);

    if (r == 0)
        r = mgr_model_set_quant(m, request->quant, err);
    if (r < 0) {
        m->kv_kind = kv_kind;
        m->kv_asked = kv_asked;
        m->own_bytes = own_bytes;
    }
    return r;
}

static void rpc_load(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__LoadModelRequest *request = (const void *)message;
    struct mgr *mgr = user;
    struct error err = {0};
    struct mgr_model *m;

    if (mgr->draining) {
        mgr_call_refuse(call, EAGAIN, "the daemon is shutting down; try again when it is back");
        return;
    }
    if (asks_standby(request) && request->standby > STANDBY_MOST) {
        mgr_call_refuse(call, EINVAL, "%u standbys; at most %d are possible", request->standby,
                        STANDBY_MOST);
        return;
    }
    if (load_target(mgr, request, &m, &err) < 0 || set_form(m, request, &err) < 0) {
        mgr_call_fail(call, &err);
        return;
    }
    if (asks_standby(request))
        m->standby = request->standby;
    mgr_settle_soon(mgr);
    m->used_ns = clock_ns();
    bool parked = m->state == MODEL_PARKED;
    if (parked && (asks_standby(request) || request->kv_bytes || *request->kv_type))
        mgr_fdstore_put(m);
    if (parked && !m->loader) {
        finish_load(m, call);
        return;
    }
    struct mgr_watch *w = watch_new(m, call);
    TAILQ_INSERT_TAIL(&m->loads, w, link);
    grpc_call_on_cancel(call, load_cancelled, w);
    send_progress(m, call,
                  m->state == MODEL_LOADING ? m->phase
                  : parked                  ? "checking"
                                            : "queued",
                  NULL);
    m->wanted |= !parked; /* from here on it is loaded whether the caller stays or not */
}

static void rpc_unload(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__UnloadModelRequest *request = (const void *)message;
    static const struct error why = {-EAGAIN, "the model is being unloaded"};
    struct mgr_model *m = mgr_model_find(user, request->name);

    if (!m) {
        mgr_call_refuse(call, ENOENT, "no model is called \"%.*s\"", MGR_NAME_MAX, request->name);
        return;
    }
    if (!request->force && (m->instances[INSTANCE_HOT] || m->n_waiting)) {
        mgr_call_refuse(
            call, ESTALE,
            "model %s has %u leased instances and %u spawns waiting; stop them or use force",
            m->name, m->instances[INSTANCE_HOT], m->n_waiting);
        return;
    }
    if (!request->force && m->state == MODEL_LOADING) {
        mgr_call_refuse(call, ESTALE, "model %s is being loaded; wait, or use force", m->name);
        return;
    }
    bool resident = m->state != MODEL_COLD && m->state != MODEL_FAILED;
    struct mgr_watch *w = watch_new(m, call);
    w->bytes = m->charged;
    TAILQ_INSERT_TAIL(&m->unloads, w, link);
    grpc_call_on_cancel(call, unload_cancelled, w);
    mgr_model_unload(m, &why);
    if (!resident)
        mgr_model_forget(m);
}

static void rpc_list_models(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    Ember__V1__ListModelsResponse response = EMBER__V1__LIST_MODELS_RESPONSE__INIT;
    struct mgr *mgr = user;
    _cleanup_free_ Ember__V1__Model *models = x_alloc((mgr->n_models + 1) * sizeof *models);
    _cleanup_free_ Ember__V1__Model **list = x_alloc((mgr->n_models + 1) * sizeof *list);
    struct mgr_model *m;
    size_t n = 0;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        mgr_describe_model(m, &models[n]);
        list[n] = &models[n];
        n++;
    }
    response.n_models = n;
    response.models = list;
    grpc_call_reply(call, &response.base);
}

/* ---- instances ---- */

static void rpc_spawn(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    mgr_spawn_request(user, call, (const void *)message);
}

static void rpc_stop(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__StopInstanceRequest *request = (const void *)message;
    Ember__V1__StopInstanceResponse response = EMBER__V1__STOP_INSTANCE_RESPONSE__INIT;
    struct mgr_instance *i = mgr_instance_find(user, request->id);

    if (!i) {
        mgr_call_refuse(
            call, ENOENT,
            "no instance is called \"%.64s\"; emberctl ps (ListInstances) has those there are",
            request->id);
        return;
    }
    i->model->used_ns = clock_ns();
    if (request->keep_warm)
        mgr_lease_release(i, "given back");
    else
        mgr_instance_stop(i, "stopped by request");
    grpc_call_reply(call, &response.base);
}

/* True when `filter` names no model that exists; the call has been failed then. */
static bool filter_unknown(struct mgr *mgr, struct grpc_call *call, const char *filter)
{
    if (!*filter || mgr_model_find(mgr, filter))
        return false;
    mgr_call_refuse(call, ENOENT, "no model is called \"%.*s\"", MGR_NAME_MAX, filter);
    return true;
}

static void rpc_list_instances(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__ListInstancesRequest *request = (const void *)message;
    Ember__V1__ListInstancesResponse response = EMBER__V1__LIST_INSTANCES_RESPONSE__INIT;
    struct mgr *mgr = user;
    struct mgr_instance *i;
    size_t n = 0, room = mgr->n_instances + 1;

    if (filter_unknown(mgr, call, request->model))
        return;
    _cleanup_free_ Ember__V1__Instance *messages = x_alloc(room * sizeof *messages);
    _cleanup_free_ Ember__V1__Instance **list = x_alloc(room * sizeof *list);
    _cleanup_free_ struct mgr_describe_room *rooms = x_alloc(room * sizeof *rooms);
    TAILQ_FOREACH(i, &mgr->instances, link)
    {
        if (*request->model && strcmp(request->model, i->model->name))
            continue;
        mgr_describe_instance(i, &rooms[n], &messages[n]);
        list[n] = &messages[n];
        n++;
    }
    response.n_instances = n;
    response.instances = list;
    grpc_call_reply(call, &response.base);
}

static void send_event(struct mgr_watcher *w, struct mgr_instance *i,
                       Ember__V1__InstanceEvent__Kind kind, const char *reason)
{
    Ember__V1__InstanceEvent event = EMBER__V1__INSTANCE_EVENT__INIT;
    struct mgr_describe_room room;
    Ember__V1__Instance instance;

    if (*w->model && strcmp(w->model, i->model->name))
        return;
    mgr_describe_instance(i, &room, &instance);
    event.kind = kind;
    event.instance = &instance;
    event.reason = (char *)reason;
    grpc_call_send(w->call, &event.base); /* a reader too slow is cancelled by the library */
}

void mgr_event(struct mgr_instance *i, Ember__V1__InstanceEvent__Kind kind, const char *reason)
{
    struct mgr_watcher *w;

    TAILQ_FOREACH(w, &i->model->mgr->watchers, link)
    send_event(w, i, kind, reason);
}

static void watcher_cancelled(struct grpc_call *call, void *user)
{
    struct mgr_watcher *w = user;

    TAILQ_REMOVE(&w->mgr->watchers, w, link);
    free(w);
}

static void rpc_watch(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__WatchInstancesRequest *request = (const void *)message;
    struct mgr *mgr = user;
    struct mgr_instance *i;

    if (filter_unknown(mgr, call, request->model))
        return;
    struct mgr_watcher *w = x_alloc(sizeof *w);
    w->mgr = mgr;
    w->call = call;
    snprintf(w->model, sizeof w->model, "%s", request->model);
    TAILQ_INSERT_TAIL(&mgr->watchers, w, link);
    grpc_call_on_cancel(call, watcher_cancelled, w);
    TAILQ_FOREACH(i, &mgr->instances, link)
    send_event(w, i, EMBER__V1__INSTANCE_EVENT__KIND__CURRENT, "");
}

void mgr_watchers_end(struct mgr *mgr)
{
    while (!TAILQ_EMPTY(&mgr->watchers)) {
        struct mgr_watcher *w = TAILQ_FIRST(&mgr->watchers);
        TAILQ_REMOVE(&mgr->watchers, w, link);
        grpc_call_finish(w->call, GRPC_UNAVAILABLE, "the daemon is shutting down");
        free(w);
    }
}

/* ---- status and health ---- */

static void add_up(struct mgr *mgr, Ember__V1__GetStatusResponse *out)
{
    struct mgr_model *m;
    struct mgr_instance *i;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        if (m->state == MODEL_LOADING)
            out->memory_reserved += m->charged;
        else
            out->memory_weights += m->charged;
        out->standby += m->instances[INSTANCE_WARM];
        out->leased += m->instances[INSTANCE_HOT];
        out->starting += m->instances[INSTANCE_STARTING];
    }
    TAILQ_FOREACH(i, &mgr->instances, link)
    {
        if (i->state == INSTANCE_STARTING)
            out->memory_reserved += i->bytes;
        else
            out->memory_instances += i->bytes;
    }
}

static void rpc_status(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    Ember__V1__GetStatusResponse out = EMBER__V1__GET_STATUS_RESPONSE__INIT;
    Ember__V1__GatewayStatus gateway;
    Ember__V1__CacheCount counts[MGR_CACHE_COUNTS_MAX], *list[MGR_CACHE_COUNTS_MAX];
    struct mgr *mgr = user;

    out.version = (char *)EMBER_VERSION;
    out.pid = getpid();
    out.uptime_seconds = clock_ms_since(mgr->started_ns) / 1e3;
    out.memory_budget = mgr_budget(mgr);
    out.own_rss = mem_resident();
    out.models = (uint32_t)mgr->n_models;
#define X(name) out.name = mgr->counters.name;
    MGR_COUNTERS(X)
#undef X
    out.cache_dir = mgr->options.cache_dir;
    out.backend = mgr->options.backend;
    out.draining = mgr->draining;
    mgr_gateway_describe(mgr, &gateway);
    out.gateway = &gateway;
    for (size_t i = 0; i < mgr->n_cache_counts; i++) {
        ember__v1__cache_count__init(&counts[i]);
        counts[i].kind = mgr->cache_counts[i].kind;
        counts[i].cause = mgr->cache_counts[i].cause;
        counts[i].count = mgr->cache_counts[i].count;
        list[i] = &counts[i];
    }
    out.n_cache = mgr->n_cache_counts;
    out.cache = list;
    add_up(mgr, &out);
    grpc_call_reply(call, &out.base);
}

/*
 * Four truths: "" the process answers, "ember.v1.Ember" calls are taken, "startup" what was to be
 * preloaded has been (or has failed), "ready" a spawn would be answered at once.
 */
void mgr_service_health(struct mgr *mgr)
{
    bool startup = true, ready = true;
    struct mgr_model *m;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        startup &= !m->wanted;
        ready &= m->state != MODEL_PARKED || !mgr_model_target(m) || m->instances[INSTANCE_WARM] ||
                 m->instances[INSTANCE_HOT];
    }
    if (mgr->startup_done)
        startup = true;
    mgr->startup_done = startup;
    ready &= startup && !mgr->draining;
    if (mgr->draining)
        grpc_server_set_health(mgr->server, "", GRPC_HEALTH_NOT_SERVING);
    grpc_server_set_health(mgr->server, "ember.v1.Ember",
                           mgr->draining ? GRPC_HEALTH_NOT_SERVING : GRPC_HEALTH_SERVING);
    grpc_server_set_health(mgr->server, "startup",
                           startup ? GRPC_HEALTH_SERVING : GRPC_HEALTH_NOT_SERVING);
    grpc_server_set_health(mgr->server, "ready",
                           ready ? GRPC_HEALTH_SERVING : GRPC_HEALTH_NOT_SERVING);
}

/* ---- registration ---- */

/* Root, ourselves, and our group: the socket's mode lets nobody else in anyway. */
static bool admit_peer(const struct ucred *peer, void *user)
{
    return peer->uid == 0 || peer->uid == geteuid() || peer->gid == getegid();
}

static int listen_tcp(struct mgr *mgr, const char *address, struct error *err)
{
    char host[128];
    uint16_t port;

    if (!*address)
        return 0;
    int r = address_split(address, host, sizeof host, &port, err);
    if (r == 0)
        r = grpc_server_listen_tcp(mgr->server, host, port, &port, err);
    if (r < 0)
        return error_prefix(err, "listen");
    log_info("listening", "address=%s:%u", host, port);
    return 0;
}

static int listen_all(struct mgr *mgr, struct error *err)
{
    for (size_t k = 0; k < mgr->n_listen_fds; k++) {
        int r = grpc_server_listen_fd(mgr->server, mgr->listen_fds[k], err);
        if (r < 0)
            return r;
    }
    if (!mgr->n_listen_fds) {
        int r = grpc_server_listen_unix(mgr->server, mgr->options.socket, 0660, err);
        if (r < 0)
            return r;
    }
    return listen_tcp(mgr, mgr->options.listen, err);
}

int mgr_service_init(struct mgr *mgr, struct error *err)
{
    static const struct grpc_method methods[] = {
        {"LoadModel", GRPC_SERVER_STREAM, rpc_load},
        {"UnloadModel", GRPC_UNARY, rpc_unload},
        {"ListModels", GRPC_UNARY, rpc_list_models},
        {"SpawnInstance", GRPC_UNARY, rpc_spawn},
        {"StopInstance", GRPC_UNARY, rpc_stop},
        {"ListInstances", GRPC_UNARY, rpc_list_instances},
        {"WatchInstances", GRPC_SERVER_STREAM, rpc_watch},
        {"GetStatus", GRPC_UNARY, rpc_status},
    };
    struct grpc_server_options options = {
        .max_message = MIB, .max_held = 8 * MIB, .admit = admit_peer};

    int r = grpc_server_new(mgr->base, &options, &mgr->server, err);
    if (r == 0)
        r = grpc_server_add_service(mgr->server, &ember__v1__ember__descriptor, methods,
                                    ARRAY_LEN(methods), mgr, err);
    if (r == 0)
        r = grpc_server_add_protoset(mgr->server, ember_v1_ember_protoset,
                                     ember_v1_ember_protoset_size, err);
    if (r == 0)
        r = listen_all(mgr, err);
    return r;
}
