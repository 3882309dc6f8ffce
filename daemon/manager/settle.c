/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where policy is asked and obeyed. mgr_settle() looks at everything, asks scheduler/pool.h what
 * follows, and does it. It runs in a turn of the loop of its own, behind whatever changed
 * something, so that replies leave before the next process is forked.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "cache/resident.h"
#include "daemon/manager/manager.h"

#define FAR_AHEAD_NS UINT64_C(3600000000000)

/* ---- the budget ---- */

void mgr_budget_init(struct mgr *mgr, uint64_t resident)
{
    mgr->host_bytes = resident_host_budget();
    if (!size_add(mgr->host_bytes, resident, &mgr->host_bytes))
        mgr->host_bytes = UINT64_MAX;
}

uint64_t mgr_budget(const struct mgr *mgr)
{
    const struct emberd_options *o = &mgr->options;

    if (o->memory_limit)
        return o->memory_limit;
    return mgr->host_bytes > o->memory_reserve ? mgr->host_bytes - o->memory_reserve : 0;
}

static double mib(uint64_t bytes)
{
    return (double)bytes / (double)MIB;
}

int mgr_budget_check(const struct emberd_options *o, struct error *err)
{
    uint64_t total = resident_host_total(), limit = o->memory_limit ? o->memory_limit : total;

    if (o->memory_limit > total)
        return error_set(err, EDQUOT,
                         "memory_limit is %.1f MiB; this host has %.1f MiB of memory and swap",
                         mib(o->memory_limit), mib(total));
    if (!o->memory_limit && o->memory_reserve >= total)
        return error_set(err, EDQUOT,
                         "memory_reserve is %.1f MiB and leaves nothing: this host has %.1f MiB of "
                         "memory and swap",
                         mib(o->memory_reserve), mib(total));
    if (o->kv_bytes > limit)
        return error_set(err, EDQUOT, "kv_bytes is %.1f MiB; %s %.1f MiB%s", mib(o->kv_bytes),
                         o->memory_limit ? "memory_limit is" : "this host has", mib(limit),
                         o->memory_limit ? "" : " of memory and swap");
    return 0;
}

/* ---- the snapshot ---- */

static enum pool_place place_of(enum model_state state)
{
    static const enum pool_place places[] = {
        [MODEL_COLD] = POOL_COLD,     [MODEL_LOADING] = POOL_LOADING,
        [MODEL_PARKED] = POOL_PARKED, [MODEL_LEAVING] = POOL_LEAVING,
        [MODEL_FAILED] = POOL_COLD,
    };
    return places[state];
}

static struct pool_model snapshot_model(const struct mgr_model *m, bool blocked)
{
    const struct mgr_spawn *first = TAILQ_FIRST(&m->waiting);

    return (struct pool_model){
        .place = place_of(m->state),
        .weights_bytes = m->charged,
        .instance_bytes = MAX(mgr_model_instance_bytes(m), 1),
        .target = mgr_model_target(m),
        .standby = m->instances[INSTANCE_WARM],
        .starting = m->instances[INSTANCE_STARTING],
        .leased = m->instances[INSTANCE_HOT],
        .waiting = m->n_waiting,
        .waiting_since = first ? first->received_ns : 0,
        .used_ns = m->used_ns,
        .reload_ns = m->load_ns,
        .failures = m->failures,
        .early_deaths = m->early_deaths,
        .failed_ns = m->failed_ns,
        .early = mgr_model_early(m),
        .blocked = blocked,
    };
}

/* The i-th entry is the i-th model of the list. `keep` keeps the marks of this round. */
static struct pool snapshot(struct mgr *mgr, bool keep)
{
    struct pool pool = {.now_ns = clock_ns(),
                        .budget = mgr_budget(mgr),
                        .max_burst = (uint32_t)mgr->options.max_burst,
                        .standby_max = (uint32_t)mgr->options.standby_max};
    const struct mgr_model *m;
    const struct mgr_instance *i;

    if (mgr->pool_room < mgr->n_models) {
        mgr->pool_room = mgr->n_models + 8;
        mgr->pool_models = x_realloc(mgr->pool_models, mgr->pool_room * sizeof *mgr->pool_models);
        mgr->rooms = x_realloc(mgr->rooms, mgr->pool_room * sizeof *mgr->rooms);
    }
    pool.models = mgr->pool_models;
    TAILQ_FOREACH(m, &mgr->models, link)
    {
        pool.models[pool.n] = snapshot_model(m, keep && pool.models[pool.n].blocked);
        pool.charged += m->charged;
        pool.leaving += m->state == MODEL_LEAVING ? m->charged : 0;
        pool.n++;
    }
    TAILQ_FOREACH(i, &mgr->instances, link)
    {
        pool.charged += i->bytes;
        pool.leaving += i->state == INSTANCE_STOPPING ? i->bytes : 0;
    }
    return pool;
}

static struct mgr_model *model_at(struct mgr *mgr, size_t index)
{
    struct mgr_model *m = TAILQ_FIRST(&mgr->models);

    while (index--)
        m = TAILQ_NEXT(m, link);
    return m;
}

/* ---- acting ---- */

/*
 * own: bytes that the model has taken itself, which it cannot do without. -EDQUOT: no room will
 * ever come, -ENOMEM: it may.
 */
static void explain_shortage(const struct pool_shortage *s, const char *what, uint64_t own,
                             struct error *err)
{
    char beside[64] = "";

    if (own)
        snprintf(beside, sizeof beside, ", of which its weights take %.1f MiB", (double)own / MIB);
    if (s->need > s->budget || own > s->budget - s->need) {
        error_set(err, EDQUOT,
                  "%s needs %.1f MiB; the budget is %.1f MiB%s: raise memory_limit or ask for less "
                  "(emberctl load --quant, --kv-bytes)",
                  what, (double)s->need / MIB, (double)s->budget / MIB, beside);
        return;
    }
    error_set(
        err, ENOMEM,
        "%s needs %.1f MiB; the budget is %.1f MiB, of which %.1f MiB are taken and only %.1f "
        "MiB could be given up (leased and loading models cannot): stop instances, unload a "
        "model or raise memory_limit",
        what, (double)s->need / MIB, (double)s->budget / MIB, (double)s->charged / MIB,
        (double)s->reclaimable / MIB);
}

static void make_room(struct mgr *mgr, const struct pool *pool)
{
    static const struct error evicted = {-EAGAIN, "evicted to make room for another model"};
    struct mgr_model *m;
    size_t i = 0;

    TAILQ_FOREACH(m, &mgr->models, link)
    {
        const struct pool_room *room = &mgr->rooms[i++];
        if (room->evict) {
            mgr->counters.evictions++;
            mgr_model_unload(m, &evicted);
        } else if (room->stop) {
            mgr_instance_stop_spares(m, room->stop, "trimmed: memory is short");
        }
    }
}

/* Asks for `need` bytes and makes room if that is the answer. */
static enum pool_verdict admit(struct mgr *mgr, struct pool *pool, int requester, uint64_t need,
                               enum pool_purpose purpose, struct pool_shortage *shortage)
{
    enum pool_verdict verdict = pool_admit(pool, requester, need, purpose, mgr->rooms, shortage);

    if (verdict == POOL_ROOM) {
        make_room(mgr, pool);
        *pool = snapshot(mgr, true);
        /* What has gone without a process to wait for is free already. */
        if (pool_admit(pool, requester, need, purpose, mgr->rooms, shortage) == POOL_ADMIT)
            verdict = POOL_ADMIT;
    }
    return verdict;
}

/* True when a load waits for room: nothing may be refilled into it then. */
static bool settle_loads(struct mgr *mgr)
{
    bool short_of_memory = false;
    struct mgr_model *m;
    int index = 0;

    TAILQ_FOREACH(m, &mgr->models, link)
    if ((m->state == MODEL_COLD || m->state == MODEL_FAILED) && !m->loader && mgr_model_wanted(m))
        mgr_model_load_start(m);
    TAILQ_FOREACH(m, &mgr->models, link)
    {
        struct pool_shortage shortage;
        struct error err = {0};
        int requester = index++;
        if (m->state != MODEL_LOADING || strcmp(m->phase, "admitting"))
            continue;
        struct pool pool = snapshot(mgr, false);
        enum pool_verdict verdict =
            admit(mgr, &pool, requester, m->weights_bytes, POOL_DEMAND, &shortage);
        if (verdict == POOL_ADMIT)
            mgr_model_load_admit(m);
        short_of_memory |= verdict == POOL_WAIT || verdict == POOL_ROOM;
        if (verdict != POOL_REFUSE)
            continue;
        explain_shortage(&shortage, "loading it", 0, &err);
        mgr_model_load_refuse(m, &err);
    }
    return short_of_memory;
}

/* Those who wait beyond what is being started already cannot be served. */
static void refuse_waiting(struct mgr_model *m, const struct pool_shortage *shortage)
{
    struct error err = {0};
    uint32_t coming = m->instances[INSTANCE_STARTING] + m->instances[INSTANCE_WARM];

    explain_shortage(shortage, "another instance", m->charged, &err);
    error_prefix(&err, "model %s", m->name);
    if (m->n_waiting > coming)
        mgr_spawn_fail(m, m->n_waiting - coming, &err);
}

static uint64_t settle_starts(struct mgr *mgr, bool short_of_memory)
{
    struct pool pool = snapshot(mgr, false);
    enum pool_purpose purpose;
    uint64_t wake = UINT64_MAX;
    int next;

    pool.short_of_memory = short_of_memory;
    while ((next = pool_next_start(&pool, &purpose, &wake)) >= 0) {
        struct mgr_model *m = model_at(mgr, (size_t)next);
        struct pool_shortage shortage;
        struct error err = {0};
        bool started = false;
        enum pool_verdict verdict =
            admit(mgr, &pool, next, pool.models[next].instance_bytes, purpose, &shortage);
        if (verdict == POOL_ADMIT)
            started = mgr_instance_start(m, &err) == 0;
        else if (verdict == POOL_REFUSE && purpose == POOL_DEMAND)
            refuse_waiting(m, &shortage);
        if (err.code)
            log_warn("instance not started", "model=%s error=\"%s\"", m->name, err.text);
        if (purpose == POOL_DEMAND)
            short_of_memory |= verdict == POOL_WAIT || verdict == POOL_ROOM;
        pool = snapshot(mgr, true);
        pool.short_of_memory = short_of_memory;
        /* A failed start may be tried again at once for who waits; each try counts. */
        if (!started && (verdict != POOL_ADMIT || purpose == POOL_REFILL))
            pool.models[next].blocked = true;
    }
    return wake;
}

/* Standbys that nobody needs, models that nobody has used: returns when to look again. */
static uint64_t settle_idle(struct mgr *mgr)
{
    uint64_t now = clock_ns(), wake = UINT64_MAX, unload = mgr->options.idle_unload;
    static const struct error idle = {-EAGAIN, "unloaded: nobody has used it for a while"};
    struct mgr_model *m;
    struct mgr_instance *i;

    TAILQ_FOREACH(i, &mgr->instances, link)
    {
        struct pool_model p = snapshot_model(i->model, false);
        if (i->state != INSTANCE_WARM || !pool_surplus(&p))
            continue;
        if (now - i->idle_ns >= MGR_LINGER_NS)
            mgr_instance_stop_spares(i->model, 1, "more standbys than wanted");
        else
            wake = MIN(wake, i->idle_ns + MGR_LINGER_NS);
    }
    TAILQ_FOREACH(m, &mgr->models, link)
    {
        struct pool_model p = snapshot_model(m, false);
        if (!unload || !pool_idle(&p))
            continue;
        if (now - m->used_ns >= unload)
            mgr_model_unload(m, &idle);
        else
            wake = MIN(wake, m->used_ns + unload);
    }
    return wake;
}

/* A measurement may have turned out above its estimate: the idle give way. */
static void settle_overrun(struct mgr *mgr)
{
    struct pool pool = snapshot(mgr, false);
    struct pool_shortage shortage;

    if (pool.charged - pool.leaving > pool.budget)
        admit(mgr, &pool, -1, 0, POOL_DEMAND, &shortage);
}

static void on_settle(int fd, short what, void *arg)
{
    struct mgr *mgr = arg;
    uint64_t wake = UINT64_MAX, now;

    if (!mgr->draining) {
        bool short_of_memory = settle_loads(mgr);
        settle_overrun(mgr);
        wake = settle_starts(mgr, short_of_memory);
        wake = MIN(wake, settle_idle(mgr));
        mgr_pack_settle(mgr);
    }
    now = clock_ns();
    if (wake != UINT64_MAX) {
        uint64_t ns = MIN(wake > now ? wake - now : 0, FAR_AHEAD_NS) + 1000000u;
        struct timeval tv = {(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};
        event_add(&mgr->on_look, &tv);
    }
    mgr_service_health(mgr);
    mgr_notify_status(mgr);
}

void mgr_settle_soon(struct mgr *mgr)
{
    static const struct timeval at_once = {0, 0};

    if (!event_pending(&mgr->on_settle, EV_TIMEOUT, NULL))
        event_add(&mgr->on_settle, &at_once);
}

void mgr_settle_init(struct mgr *mgr)
{
    event_assign(&mgr->on_settle, mgr->base, -1, 0, on_settle, mgr);
    event_assign(&mgr->on_look, mgr->base, -1, 0, on_settle, mgr);
}

void mgr_settle_free(struct mgr *mgr)
{
    event_del(&mgr->on_settle);
    event_del(&mgr->on_look);
    free(mgr->pool_models);
    free(mgr->rooms);
}
