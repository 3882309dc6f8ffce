/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The manager's internals. One thread, one event loop; every state change happens in it.
 *
 *   main.c      start, signals, stop
 *   child.c     one child process, from fork to last words
 *   model.c     models: registered, loaded, resident, unloaded
 *   instance.c  instances: started, warm, leased, gone
 *   spawn.c     spawns that wait, leases
 *   settle.c    the one place where policy (scheduler/pool.h) is asked and obeyed
 *   packer.c    packs that are written in the background
 *   notify.c    telling systemd;  fdstore.c  weights in its descriptor store, and back
 *   gateway.c   ember-gateway: started, watched, stopped
 *   service.c   the RPCs;  describe.c  our state as messages
 *
 * Whoever changes a fact (a child ended, a spawn came, a lease ended) changes only that and calls
 * mgr_settle_soon(); mgr_settle() then makes everything follow: loads, starts, evictions, replies.
 */
#ifndef EMBER_DAEMON_MANAGER_MANAGER_H
#define EMBER_DAEMON_MANAGER_MANAGER_H

#include <event2/event.h>
#include <event2/event_struct.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "base/error.h"
#include "cache/filling.h"
#include "daemon/address.h"
#include "daemon/manager/child.h"
#include "daemon/manager/options.h"
#include "ember/v1/ember.pb-c.h"
#include "ember/v1/internal.pb-c.h"
#include "proto/grpc/server.h"
#include "scheduler/pool.h"
#include "model/model.h"
#include "model/pack/pack.h"

#define MGR_NAME_MAX 128                       /* bytes of a model's name */
#define MGR_HOLDER_MAX 128                     /* bytes of a lease holder's name */
#define MGR_PHASES_MAX 12                      /* phase times kept of an instance's start */
#define MGR_WAITING_MAX 4096                   /* spawns that may wait at a time */
#define MGR_STOP_GRACE_NS UINT64_C(1000000000) /* from end of stream to SIGKILL */
#define MGR_PROVEN_NS UINT64_C(5000000000)     /* what has lived for so long is no crash loop */
#define MGR_LINGER_NS UINT64_C(10000000000)    /* a standby beyond the target is kept for so long */

/* Since the start; fields of GetStatusResponse. */
#define MGR_COUNTERS(X)                                                                            \
    X(spawns)                                                                                      \
    X(spawns_from_pool)                                                                            \
    X(spawn_failures)                                                                              \
    X(loads)                                                                                       \
    X(load_failures)                                                                               \
    X(packs)                                                                                       \
    X(evictions)                                                                                   \
    X(instances_lost)

/*
 * X(state, what the API calls it, states it may be entered from)
 * Invariants (checked at each transition): descriptors are held exactly in PARKED; a loader runs in
 * LOADING (and for a moment behind it); instances exist only in PARKED and LEAVING, and in LOADING
 * once it can be attached to (`early`); nothing is charged in COLD and FAILED.
 */
#define MGR_MODEL_STATES(X)                                                                        \
    X(MODEL_COLD, COLD, BIT(MODEL_LOADING) | BIT(MODEL_LEAVING))                                   \
    X(MODEL_LOADING, LOADING, BIT(MODEL_COLD) | BIT(MODEL_FAILED))                                 \
    X(MODEL_PARKED, PARKED, BIT(MODEL_LOADING) | BIT(MODEL_COLD))                                  \
    X(MODEL_LEAVING, PARKED, BIT(MODEL_PARKED) | BIT(MODEL_LOADING))                               \
    X(MODEL_FAILED, FAILED, BIT(MODEL_LOADING) | BIT(MODEL_LEAVING))

/*
 * Invariants (checked at each transition): a lease exists exactly in HOT; READY has been received
 * in WARM and HOT; the child exists until GONE.
 */
#define MGR_INSTANCE_STATES(X)                                                                     \
    X(INSTANCE_STARTING, LOADING, 0)                                                               \
    X(INSTANCE_WARM, WARM, BIT(INSTANCE_STARTING) | BIT(INSTANCE_HOT))                             \
    X(INSTANCE_HOT, HOT, BIT(INSTANCE_WARM))                                                       \
    X(INSTANCE_STOPPING, COLD, BIT(INSTANCE_STARTING) | BIT(INSTANCE_WARM) | BIT(INSTANCE_HOT))    \
    X(INSTANCE_GONE, COLD,                                                                         \
      BIT(INSTANCE_STARTING) | BIT(INSTANCE_WARM) | BIT(INSTANCE_HOT) | BIT(INSTANCE_STOPPING))

#define BIT(n) (1u << (n))

enum model_state {
#define X(id, warmth, from) id,
    MGR_MODEL_STATES(X)
#undef X
};
enum instance_state {
#define X(id, warmth, from) id,
    MGR_INSTANCE_STATES(X)
#undef X
};

/* A SpawnInstance that waits for its instance. */
struct mgr_spawn {
    TAILQ_ENTRY(mgr_spawn) link;
    struct mgr_model *model;
    struct grpc_call *call;
    char holder[MGR_HOLDER_MAX + 1];
    uint64_t ttl_ns, received_ns, parked_ns; /* parked_ns: when its load was done; 0: no load */
    Ember__V1__Warmth from;
};

TAILQ_HEAD(mgr_spawns, mgr_spawn);

/* A LoadModel stream, or an UnloadModel call that waits until the bytes are free. */
struct mgr_watch {
    TAILQ_ENTRY(mgr_watch) link;
    struct mgr_model *model;
    struct grpc_call *call;
    uint64_t sent_ns, bytes;
};
TAILQ_HEAD(mgr_watches, mgr_watch);

struct mgr_model {
    TAILQ_ENTRY(mgr_model) link;
    struct mgr *mgr;
    char name[MGR_NAME_MAX + 1];
    char *path;
    char *quant; /* what is quantised while it is loaded; "": nothing */
    enum model_state state;
    const char *phase; /* of a load: "planning", "admitting", "reading", "ending" */

    char architecture[48], digest[33];
    uint64_t weights_bytes, parameters, kv_page_bytes[KV_KIND_COUNT];
    uint32_t vocab_size, max_positions;
    int weights_fd, manifest_fd;
    /* Of a load that can be attached to: what its instances are given; NULL and -1 otherwise. */
    struct filling *early;
    int early_fds[3]; /* weights, manifest, the page of `early` */
    bool from_pack;
    char recipe[PACK_RECIPE_MAX + 1]; /* of that pack: how it was quantised */
    char notice[ERROR_TEXT_MAX];      /* what of it is broken beside the weights; or "" */
    struct child *packer;             /* writes its pack */
    bool pack_wanted;                 /* one is to be written when nothing else is to be done */
    uint8_t pack_key[16];             /* of the checkpoint that was loaded */

    int64_t standby;                       /* asked for; -1: the configured number */
    uint64_t kv_asked;                     /* asked for; 0: the configured number */
    int kv_kind;                           /* asked for, enum kv_kind; -1: the configured one */
    uint64_t own_bytes;                    /* measured of an instance, KV included; 0: not yet */
    uint64_t charged;                      /* of the budget, for the weights */
    uint32_t instances[INSTANCE_GONE + 1]; /* how many are in each state */

    struct child *loader;
    bool configured;     /* the default model or a preloaded one: never forgotten */
    bool forgotten;      /* to be taken off the table when its loader has gone */
    bool wanted;         /* a load is to be (or is being) done although nobody may be waiting */
    bool leaving_failed; /* LEAVING behind a load that failed: FAILED behind it, not COLD */
    bool load_late;      /* the load was given up by UnloadModel: COLD behind it, not FAILED */
    uint64_t load_started_ns, admitted_ns, bytes_done, load_ns;
    uint64_t used_ns;

    uint32_t early_deaths; /* instances that died within MGR_PROVEN_NS of READY, in a row */
    uint32_t failures;     /* starts of instances that failed in a row */
    uint64_t failed_ns;
    struct error error; /* of the last load or start that failed */

    struct mgr_spawns waiting;
    uint32_t n_waiting;
    struct mgr_watches loads, unloads;
};

struct mgr_phase {
    char name[24];
    double ms;
};

struct mgr_instance {
    TAILQ_ENTRY(mgr_instance) link;
    struct mgr_model *model;
    char id[32];
    char *socket;
    enum instance_state state;
    struct child *child;
    pid_t pid;
    uint32_t place; /* which CPUs it may have for itself (base/topology.h) */
    uint64_t started_ns, ready_ns, idle_ns; /* idle_ns: since when it has been WARM */
    uint64_t bytes;                         /* charged: estimated, from READY on measured */
    struct mgr_phase phases[MGR_PHASES_MAX];
    size_t n_phases;
    uint32_t kernels_compiled, graphs_captured;

    char token[33], holder[MGR_HOLDER_MAX + 1];
    uint64_t ttl_ns;
    bool driver_connected, failed; /* failed: it is being stopped for not answering */
    struct event on_lease_end;
};

/* A WatchInstances stream. */
struct mgr_watcher {
    TAILQ_ENTRY(mgr_watcher) link;
    struct mgr *mgr;
    struct grpc_call *call;
    char model[MGR_NAME_MAX + 1];
};

/* Look-ups of instances in the cache: cause "" are those that found something. */
struct mgr_cache_count {
    char kind[16], cause[72];
    uint64_t count;
};
#define MGR_CACHE_COUNTS_MAX 48 /* what is beyond has the cause "other" */

/* X(state, what the API calls it) */
#define MGR_GATEWAY_STATES(X)                                                                      \
    X(GATEWAY_OFF, "off")                                                                          \
    X(GATEWAY_WAITING, "waiting")                                                                  \
    X(GATEWAY_STARTING, "starting")                                                                \
    X(GATEWAY_SERVING, "serving")                                                                  \
    X(GATEWAY_STOPPING, "stopping")

enum gateway_state {
#define X(id, text) id,
    MGR_GATEWAY_STATES(X)
#undef X
};

struct mgr_gateway {
    enum gateway_state state;
    struct child *child;            /* STARTING, SERVING, STOPPING */
    int listen_fd;                  /* ours as long as it may be started */
    char address[ADDRESS_TEXT_MAX]; /* of listen_fd, or as configured */
    uint64_t ready_ns;
    uint32_t starts, failures; /* failures: ends soon after a start, in a row */
    struct error error;        /* of its last end, until it is READY again */
    struct event on_retry;
};

struct mgr {
    struct emberd_options options;
    struct event_base *base;
    struct grpc_server *server;
    struct event on_settle, on_look, on_watchdog, on_drained;
    uint64_t started_ns;

    TAILQ_HEAD(, mgr_model) models;
    TAILQ_HEAD(, mgr_instance) instances;
    TAILQ_HEAD(, mgr_watcher) watchers;
    size_t n_models, n_instances;
    struct mgr_model *default_model;
    struct mgr_gateway gateway;
    uint32_t n_waiting;
    uint64_t ids;
    uint32_t id_epoch;
    uint64_t host_bytes; /* what the host or cgroup had for us at the start */

    struct {
#define X(name) uint64_t name;
        MGR_COUNTERS(X)
#undef X
    } counters;
    struct mgr_cache_count cache_counts[MGR_CACHE_COUNTS_MAX];
    size_t n_cache_counts;
    char *packs_dir;
    char notice[256]; /* the last thing that instances had to say */

    int *listen_fds; /* listening sockets that systemd made for us */
    size_t n_listen_fds;

    bool draining, killing, startup_done, cache_suspected;
    bool stop_now; /* asked twice to end */
    int lock_fd;

    struct pool_model *pool_models; /* scratch of settle.c */
    struct pool_room *rooms;
    size_t pool_room;
};

/* ---- settle.c ---- */

/* Measures what the host has; `resident` bytes are ours already. */
void mgr_budget_init(struct mgr *mgr, uint64_t resident);
uint64_t mgr_budget(const struct mgr *mgr);
/* -EDQUOT: options ask for more memory than this host can ever hold; the text names both. */
int mgr_budget_check(const struct emberd_options *options, struct error *err);
void mgr_settle_soon(struct mgr *mgr);
void mgr_settle_init(struct mgr *mgr);
void mgr_settle_free(struct mgr *mgr);

/* ---- model.c ---- */

/* By name; "" is the default model; NULL when there is none. */
struct mgr_model *mgr_model_find(struct mgr *mgr, const char *name);
/* A COLD model, or the one that has this name and path already. -EEXIST: the name has another path.
 */
int mgr_model_register(struct mgr *mgr, const char *name, const char *path, struct mgr_model **ret,
                       struct error *err);
/* The name that a folder or pack gives its model: its last component, without ".pack". -EINVAL when
 * there is none. */
int mgr_model_name_of(const char *path, char name[MGR_NAME_MAX + 1], struct error *err);
/* Checks a path from outside and strips trailing slashes. The caller frees *ret. */
int mgr_model_path_check(const char *path, char **ret, struct error *err);
/* Instances of it can be started: it is PARKED, or it can be attached to already. */
bool mgr_model_startable(const struct mgr_model *model);
/* The load can be attached to, and will be over soon enough for a step to wait for its end. */
bool mgr_model_early(const struct mgr_model *model);
bool mgr_model_wanted(const struct mgr_model *model);
uint32_t mgr_model_target(const struct mgr_model *model);
uint64_t mgr_model_kv_bytes(const struct mgr_model *model);
/* What new instances keep K and V in. */
enum kv_kind mgr_model_kv_kind(const struct mgr_model *model);
uint64_t mgr_model_instance_bytes(const struct mgr_model *model);
/* What a request wants to be quantised ("": whatever it was); -EEXIST when the model is there with
 * another form, -EINVAL when it is no text of rules. */
int mgr_model_set_quant(struct mgr_model *model, const char *quant, struct error *err);
/* Whether so much KV (0: not asked for) holds a page of the model, else -EINVAL, and fits into the
 * budget beside its weights, else -EDQUOT; as far as these are known. */
int mgr_model_kv_check(const struct mgr_model *model, uint64_t kv_bytes, struct error *err);
void mgr_model_load_start(struct mgr_model *model);
void mgr_model_load_admit(struct mgr_model *model); /* memory has been found for it */
void mgr_model_load_refuse(struct mgr_model *model, const struct error *why);
/* PARKED from descriptors that an earlier manager left. Takes the descriptors. */
void mgr_model_adopt(struct mgr_model *model, int weights_fd, int manifest_fd);
/* Ends residency: instances stop, descriptors close. Spawns and loads that wait fail with `why`. */
void mgr_model_unload(struct mgr_model *model, const struct error *why);
/* To be called when an instance of it has gone: a LEAVING model may be COLD now. */
void mgr_model_check_left(struct mgr_model *model);
/* Takes a model that is not resident off the table, unless it is a configured one. */
void mgr_model_forget(struct mgr_model *model);
void mgr_model_free(struct mgr_model *model);

/* ---- instance.c ---- */

int mgr_instance_start(struct mgr_model *model, struct error *err);
void mgr_instance_set_state(struct mgr_instance *instance, enum instance_state state);
void mgr_instance_stop(struct mgr_instance *instance, const char *reason);
struct mgr_instance *mgr_instance_find(struct mgr *mgr, const char *id);
/* The standby that was last of use (its pages are the warmest), or NULL. */
struct mgr_instance *mgr_instance_warm(struct mgr_model *model);
/* Stops n unclaimed instances: starting ones first, then the coldest standbys. */
void mgr_instance_stop_spares(struct mgr_model *model, uint32_t n, const char *reason);

/* ---- spawn.c ---- */

void mgr_spawn_request(struct mgr *mgr, struct grpc_call *call,
                       const Ember__V1__SpawnInstanceRequest *request);
/* Gives standbys to those who wait, in their order. */
void mgr_spawn_grant_all(struct mgr_model *model);
/* Fails the last `n` of those who wait. */
void mgr_spawn_fail(struct mgr_model *model, uint32_t n, const struct error *why);
/* Ends the lease: the instance is a standby again. */
void mgr_lease_release(struct mgr_instance *instance, const char *reason);
/* The driver of an instance has come or gone. */
void mgr_lease_driver(struct mgr_instance *instance, bool connected, const char *token);

/* ---- packer.c ---- */

void mgr_pack_init(struct mgr *mgr);
/* The folder of packs; NULL: none. */
const char *mgr_packs_dir(const struct mgr *mgr);
/* A load is over: notes whether its pack is to be written. */
void mgr_pack_loaded(struct mgr_model *model, const Ember__V1__LoaderDone *done);
/* Starts what has been noted, when it is in nobody's way. */
void mgr_pack_settle(struct mgr *mgr);
/* Ends it: the model's memory is about to be given up. */
void mgr_pack_stop(struct mgr_model *model);

/* ---- notify.c ---- */

/* Messages of sd_notify(3); never block. Nothing happens without NOTIFY_SOCKET. */
void mgr_notify_init(struct mgr *mgr);
void mgr_notify_free(void);
bool mgr_notify_wanted(void);
void mgr_notify(const char *text);
void mgr_notify_fd(const char *text, int fd); /* with a duplicate of fd */

/* ---- fdstore.c ---- */

/* Takes up models whose weights systemd kept, and finds listening sockets; returns their bytes. */
uint64_t mgr_fdstore_adopt(struct mgr *mgr);
void mgr_fdstore_put(const struct mgr_model *model);
void mgr_fdstore_remove(const struct mgr_model *model);

/* ---- gateway.c ---- */

/* Starts it soon, if it is to run. */
void mgr_gateway_init(struct mgr *mgr);
/* Tells it to read its configuration again. */
void mgr_gateway_reload(struct mgr *mgr);
/* It drains and exits; mgr->gateway.child is NULL behind that. */
void mgr_gateway_stop(struct mgr *mgr);
void mgr_gateway_free(struct mgr *mgr);
/* Strings in *ret are ours. */
void mgr_gateway_describe(const struct mgr *mgr, Ember__V1__GatewayStatus *ret);

/* ---- service.c, describe.c ---- */

int mgr_service_init(struct mgr *mgr, struct error *err);
/* grpc_call_fail, with the codes that a child or the host gave put into the API's terms. */
void mgr_call_fail(struct grpc_call *call, const struct error *err);
/* The same with an error of our own. */
void mgr_call_refuse(struct grpc_call *call, int errnum, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void mgr_service_health(struct mgr *mgr);
void mgr_watch_progress(struct mgr_model *model, bool force);
/* Ends the streams of LoadModel: with success, or with `why`. */
void mgr_watch_loaded(struct mgr_model *model, const struct error *why);
void mgr_watch_unloaded(struct mgr_model *model);
void mgr_event(struct mgr_instance *instance, Ember__V1__InstanceEvent__Kind kind,
               const char *reason);
void mgr_watchers_end(struct mgr *mgr);

void mgr_describe_model(const struct mgr_model *model, Ember__V1__Model *ret);
/* Pointers in *ret lead into `room` and into the instance. */
struct mgr_describe_room {
    Ember__V1__PhaseTime phases[MGR_PHASES_MAX];
    Ember__V1__PhaseTime *list[MGR_PHASES_MAX];
};
void mgr_describe_instance(const struct mgr_instance *instance, struct mgr_describe_room *room,
                           Ember__V1__Instance *ret);

/* ---- main.c ---- */

void mgr_notify_status(struct mgr *mgr);

#endif
