/* SPDX-License-Identifier: Apache-2.0 */
/* Spawns that wait, and leases. The place in the queue is taken before a load: see pool_idle(). */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "daemon/manager/manager.h"

#define TTL_MOST_MS UINT64_C(86400000)

static void spawn_free(struct mgr_spawn *s)
{
    TAILQ_REMOVE(&s->model->waiting, s, link);
    s->model->n_waiting--;
    s->model->mgr->n_waiting--;
    free(s);
}

/* Its turn goes to the next; an instance that was being started for it goes to the pool. */
static void spawn_cancelled(struct grpc_call *call, void *user)
{
    struct mgr_spawn *s = user;
    struct mgr *mgr = s->model->mgr;

    log_debug("spawn given up by its caller", "model=%s holder=%s", s->model->name, s->holder);
    spawn_free(s);
    mgr_settle_soon(mgr);
}

static struct mgr_model *spawn_model(struct mgr *mgr, struct grpc_call *call, const char *name)
{
    struct mgr_model *model = mgr_model_find(mgr, name);

    if (mgr->draining)
        mgr_call_refuse(call, EAGAIN, "the daemon is shutting down; try again when it is back");
    else if (!model && !*name)
        mgr_call_refuse(call, ENOENT, "no default model is configured; name one");
    else if (!model)
        mgr_call_refuse(call, ENOENT,
                        "no model is called \"%.*s\"; load it first: emberctl load DIR (LoadModel)",
                        MGR_NAME_MAX, name);
    else if (mgr->n_waiting >= MGR_WAITING_MAX)
        mgr_call_refuse(call, ENOMEM, "%u spawns are waiting already; try again later",
                        mgr->n_waiting);
    else
        return model;
    mgr->counters.spawn_failures++;
    return NULL;
}

void mgr_spawn_request(struct mgr *mgr, struct grpc_call *call,
                       const Ember__V1__SpawnInstanceRequest *request)
{
    struct mgr_model *model = spawn_model(mgr, call, request->model);
    struct ucred peer;

    if (!model)
        return;
    struct mgr_spawn *s = x_alloc(sizeof *s);
    *s = (struct mgr_spawn){.model = model, .call = call, .received_ns = clock_ns()};
    if (*request->holder)
        snprintf(s->holder, sizeof s->holder, "%s", request->holder);
    else if (grpc_call_peer(call, &peer) == 0)
        snprintf(s->holder, sizeof s->holder, "pid %d", (int)peer.pid);
    utf8_tame_line(s->holder); /* cut short, perhaps within a character */
    s->ttl_ns = request->lease_ttl_ms ? MIN(request->lease_ttl_ms, TTL_MOST_MS) * 1000000u
                                      : mgr->options.lease_ttl;
    s->from = model->state == MODEL_PARKED ? EMBER__V1__WARMTH__PARKED : EMBER__V1__WARMTH__COLD;
    if (model->instances[INSTANCE_WARM] && !model->n_waiting)
        s->from = EMBER__V1__WARMTH__WARM;
    TAILQ_INSERT_TAIL(&model->waiting, s, link);
    model->n_waiting++;
    mgr->n_waiting++;
    grpc_call_on_cancel(call, spawn_cancelled, s);
    mgr_spawn_grant_all(model);
    mgr_settle_soon(mgr);
}

void mgr_spawn_fail(struct mgr_model *model, uint32_t n, const struct error *why)
{
    for (; n && !TAILQ_EMPTY(&model->waiting); n--) {
        struct mgr_spawn *s = TAILQ_LAST(&model->waiting, mgr_spawns);
        struct grpc_call *call = s->call;
        log_warn("spawn failed", "model=%s holder=\"%s\" error=\"%s\"", model->name, s->holder,
                 why->text);
        model->mgr->counters.spawn_failures++;
        spawn_free(s);
        mgr_call_fail(call, why);
    }
}

/* ---- granting ---- */

static void new_token(char token[33])
{
    uint8_t bytes[16];

    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        abort(); /* cannot happen for 16 bytes once the host has booted */
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(token + 2 * i, 3, "%02x", bytes[i]);
}

static void arm_lease(struct mgr_instance *i, uint64_t ns)
{
    struct timeval tv = {(time_t)(ns / 1000000000u), (suseconds_t)(ns % 1000000000u / 1000)};
    event_add(&i->on_lease_end, &tv);
}

/* The instance learns of the lease before its holder does: the channel keeps the order. */
static bool give_lease(struct mgr_instance *i, const struct mgr_spawn *s)
{
    Ember__V1__LeaseGrant grant = EMBER__V1__LEASE_GRANT__INIT;
    Ember__V1__ToInstance message = EMBER__V1__TO_INSTANCE__INIT;

    char token[sizeof i->token];

    new_token(token);
    grant.token = token;
    message.kind_case = EMBER__V1__TO_INSTANCE__KIND_GRANT;
    message.grant = &grant;
    if (child_send(i->child, &message.base, NULL, 0) < 0) {
        i->failed = true;
        mgr_instance_stop(i, "did not take its lease");
        return false;
    }
    memcpy(i->token, token, sizeof i->token);
    snprintf(i->holder, sizeof i->holder, "%s", s->holder);
    i->ttl_ns = s->ttl_ns;
    mgr_instance_set_state(i, INSTANCE_HOT);
    arm_lease(i, i->ttl_ns);
    return true;
}

static void answer(struct mgr_instance *i, const struct mgr_spawn *s, struct grpc_call *call)
{
    struct mgr_describe_room room;
    Ember__V1__Instance instance;
    Ember__V1__Lease lease = EMBER__V1__LEASE__INIT;
    Ember__V1__SpawnInstanceResponse response = EMBER__V1__SPAWN_INSTANCE_RESPONSE__INIT;
    Ember__V1__PhaseTime load = EMBER__V1__PHASE_TIME__INIT, grant = EMBER__V1__PHASE_TIME__INIT;
    Ember__V1__PhaseTime *phases[MGR_PHASES_MAX + 2];
    uint64_t since = s->received_ns;
    size_t n = 0;

    mgr_describe_instance(i, &room, &instance);
    if (s->parked_ns) {
        load.name = "load";
        load.ms = (double)(s->parked_ns - s->received_ns) / 1e6;
        phases[n++] = &load;
    }
    if (i->ready_ns > since) {
        since = i->ready_ns;
        for (size_t k = 0; k < instance.n_phases; k++)
            phases[n++] = instance.phases[k];
    }
    grant.name = "grant";
    grant.ms = clock_ms_since(since);
    phases[n++] = &grant;
    lease.token = i->token;
    lease.ttl_ms = i->ttl_ns / 1000000u;
    lease.grace_ms = i->model->mgr->options.lease_grace / 1000000u;
    response.instance = &instance;
    response.lease = &lease;
    response.from = s->from;
    response.phases = phases;
    response.n_phases = n;
    response.total_ms = clock_ms_since(s->received_ns);
    grpc_call_reply(call, &response.base);
}

void mgr_spawn_grant_all(struct mgr_model *model)
{
    struct mgr *mgr = model->mgr;

    while (!TAILQ_EMPTY(&model->waiting)) {
        struct mgr_instance *i = mgr_instance_warm(model);
        struct mgr_spawn *s = TAILQ_FIRST(&model->waiting);
        if (!i)
            return;
        if (!give_lease(i, s))
            continue;
        model->used_ns = clock_ns();
        mgr->counters.spawns++;
        if (s->from == EMBER__V1__WARMTH__WARM)
            mgr->counters.spawns_from_pool++;
        grpc_call_on_cancel(s->call, NULL, NULL);
        answer(i, s, s->call);
        log_info("leased", "id=%s model=%s holder=\"%s\" ms=%.2f", i->id, model->name, s->holder,
                 clock_ms_since(s->received_ns));
        mgr_event(i, EMBER__V1__INSTANCE_EVENT__KIND__LEASED, "");
        spawn_free(s);
    }
}

/* ---- the end of a lease ---- */

void mgr_lease_release(struct mgr_instance *i, const char *reason)
{
    Ember__V1__LeaseEnd end = EMBER__V1__LEASE_END__INIT;
    Ember__V1__ToInstance message = EMBER__V1__TO_INSTANCE__INIT;

    if (i->state != INSTANCE_HOT)
        return;
    log_info("lease ended", "id=%s model=%s holder=\"%s\" reason=\"%s\"", i->id, i->model->name,
             i->holder, reason);
    *i->holder = 0;
    i->model->used_ns = clock_ns();
    message.kind_case = EMBER__V1__TO_INSTANCE__KIND_END;
    message.end = &end;
    if (child_send(i->child, &message.base, NULL, 0) < 0) {
        i->failed = true;
        mgr_instance_stop(i, "did not take the end of its lease");
        return;
    }
    mgr_instance_set_state(i, INSTANCE_WARM);
    mgr_event(i, EMBER__V1__INSTANCE_EVENT__KIND__RELEASED, reason);
    if (i->model->mgr->draining)
        mgr_instance_stop(i, "shutting down");
    else
        mgr_spawn_grant_all(i->model);
}

void mgr_lease_driver(struct mgr_instance *i, bool connected, const char *token)
{
    uint64_t grace = i->model->mgr->options.lease_grace;

    if (i->state != INSTANCE_HOT || strcmp(i->token, token))
        return; /* of a lease that has ended already */
    i->driver_connected = connected;
    if (connected)
        event_del(&i->on_lease_end);
    else if (grace && !i->model->mgr->draining)
        arm_lease(i, grace);
    else
        mgr_lease_release(i, "driver gone");
}
