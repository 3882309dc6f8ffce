/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What emberd knows, followed: WatchInstances tells when something has changed, and at once when
 * emberd goes; ListModels then says what there is. Models without instances change without an
 * event, so the list is read every few seconds all the same, less often while there are streams to
 * serve, and when somebody reads the figures, as is GetStatus.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "daemon/gateway/fleet.h"

#define LIST_IDLE_NS UINT64_C(2000000000)
#define LIST_BUSY_NS UINT64_C(10000000000)
#define READ_EVERY_NS UINT64_C(1000000000) /* on behalf of readers */

static void ignore_message(struct grpc_client_call *call, const ProtobufCMessage *message,
                           void *user)
{
}

static void ignore_end(struct grpc_client_call *call, enum grpc_status status, const char *text,
                       void *user)
{
}

/* ---- models ---- */

static bool serves(const struct gw *gw, const char *name)
{
    if (!gw->options.model || !*gw->options.model)
        return true;
    for (char **p = gw->options.model; *p; p++) {
        const char *slash = strrchr(*p, '/');
        if (!strcmp(*p, name) || (slash && !strcmp(slash + 1, name)))
            return true;
    }
    return false;
}

/* Standbys that the configuration wants of the model are emberd's to keep. */
static void ask_standby(struct fleet *fleet, struct gw_model *model)
{
    static const struct grpc_client_callbacks callbacks = {ignore_message, ignore_end};
    Ember__V1__LoadModelRequest request = EMBER__V1__LOAD_MODEL_REQUEST__INIT;
    struct grpc_client_call *call;

    if (model->policy.standby < 0 || model->standby_asked)
        return;
    request.name = model->name;
    request.standby_asked_case = EMBER__V1__LOAD_MODEL_REQUEST__STANDBY_ASKED_STANDBY;
    request.standby = (uint32_t)model->policy.standby;
    model->standby_asked = grpc_client_start(fleet->client, "/ember.v1.Ember/LoadModel",
                                             &request.base, &ember__v1__load_progress__descriptor,
                                             GRPC_NO_TIMEOUT, &callbacks, fleet, &call, NULL) == 0;
}

static void on_models(struct grpc_client_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__ListModelsResponse *response = (const void *)message;
    struct fleet *fleet = user;
    struct gw *gw = fleet->gw;
    struct gw_model *model;

    TAILQ_FOREACH(model, &gw->models, link) model->listed = false;
    for (size_t i = 0; i < response->n_models; i++) {
        const Ember__V1__Model *m = response->models[i];
        if (!serves(gw, m->name))
            continue;
        model = fleet_model(gw, m->name, m->path, m->digest, m->load_ms);
        model->listed = true;
        model->warmth = m->warmth;
        model->weights_bytes = m->weights_bytes;
        model->standby = m->standby;
        model->leased = m->leased;
        model->emberd_starting = m->starting;
        ask_standby(fleet, model);
        if (!fleet->listed_once &&
            (model->policy.min || *gw->options.model || fleet_has_old(fleet, m->name)))
            fleet_read_model(model);
    }
    fleet->listed_once = true;
}

static void lost(struct fleet *fleet)
{
    struct gw_model *model;

    fleet->connected = false;
    TAILQ_FOREACH(model, &fleet->gw->models, link) model->standby_asked = false;
}

static void on_listed(struct grpc_client_call *call, enum grpc_status status, const char *text,
                      void *user)
{
    struct fleet *fleet = user;
    char why[256];

    fleet->listing = NULL;
    if (!fleet->connected && status == GRPC_OK)
        log_info("emberd reached", "");
    else if (fleet->connected && status != GRPC_OK)
        log_info("emberd lost", "reason=\"%s\"", text);
    if (status == GRPC_OK)
        fleet->connected = true;
    else
        lost(fleet);
    snprintf(why, sizeof why, "emberd cannot be reached: %s", text);
    request_models_listed(fleet->gw, fleet->connected ? NULL : why);
    if (fleet->list_again && fleet->connected)
        fleet_list(fleet->gw);
}

void fleet_list(struct gw *gw)
{
    static const struct grpc_client_callbacks callbacks = {on_models, on_listed};
    Ember__V1__ListModelsRequest request = EMBER__V1__LIST_MODELS_REQUEST__INIT;
    struct fleet *fleet = gw->fleet;
    struct error err = {0};

    fleet->list_again = fleet->listing != NULL;
    if (fleet->listing)
        return;
    fleet->listed_ns = clock_ns();
    if (grpc_client_start(fleet->client, "/ember.v1.Ember/ListModels", &request.base,
                          &ember__v1__list_models_response__descriptor, FLEET_RPC_MS, &callbacks,
                          fleet, &fleet->listing, &err) == 0)
        return;
    fleet->listing = NULL;
    if (fleet->connected)
        log_warn("emberd lost", "error=\"%s\"", err.text);
    lost(fleet);
    request_models_listed(gw, err.text);
}

void fleet_freshen(struct gw *gw)
{
    if (gw->fleet->connected && clock_ns() - gw->fleet->listed_ns >= READ_EVERY_NS)
        fleet_list(gw);
}

bool fleet_connected(const struct gw *gw)
{
    return gw->fleet->connected;
}

bool fleet_listed(const struct gw *gw)
{
    return gw->fleet->listed_once;
}

/* ---- folders ---- */

static void on_load_done(struct grpc_client_call *call, enum grpc_status status, const char *text,
                         void *user)
{
    struct fleet *fleet = user;

    if (status != GRPC_OK)
        log_error("model not loaded", "error=\"%s\"", text);
    if (!fleet->ending)
        fleet_list(fleet->gw);
}

void fleet_load_folders(struct fleet *fleet)
{
    static const struct grpc_client_callbacks callbacks = {ignore_message, on_load_done};
    struct grpc_client_call *call;

    for (char **p = fleet->gw->options.model; p && *p; p++) {
        Ember__V1__LoadModelRequest request = EMBER__V1__LOAD_MODEL_REQUEST__INIT;
        struct error err = {0};
        if (!strchr(*p, '/'))
            continue;
        request.path = *p;
        if (grpc_client_start(fleet->client, "/ember.v1.Ember/LoadModel", &request.base,
                              &ember__v1__load_progress__descriptor, GRPC_NO_TIMEOUT, &callbacks,
                              fleet, &call, &err) < 0)
            log_error("model not loaded", "path=%s error=\"%s\"", *p, err.text);
    }
}

/* ---- events ---- */

static void on_event(struct grpc_client_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__InstanceEvent *event = (const void *)message;
    struct fleet *fleet = user;

    if (event->kind != EMBER__V1__INSTANCE_EVENT__KIND__CURRENT)
        fleet_list(fleet->gw);
}

static void on_watch_end(struct grpc_client_call *call, enum grpc_status status, const char *text,
                         void *user)
{
    struct fleet *fleet = user;

    fleet->watching = NULL;
    if (!fleet->ending && fleet->connected)
        fleet_list(fleet->gw); /* says whether it has gone */
}

static void start_watch(struct fleet *fleet)
{
    static const struct grpc_client_callbacks callbacks = {on_event, on_watch_end};
    Ember__V1__WatchInstancesRequest request = EMBER__V1__WATCH_INSTANCES_REQUEST__INIT;

    if (grpc_client_start(fleet->client, "/ember.v1.Ember/WatchInstances", &request.base,
                          &ember__v1__instance_event__descriptor, GRPC_NO_TIMEOUT, &callbacks,
                          fleet, &fleet->watching, NULL) < 0) {
        fleet->watching = NULL;
        fleet_list(fleet->gw); /* says whether it has gone */
    }
}

void fleet_watch(struct gw *gw)
{
    struct fleet *fleet = gw->fleet;
    uint64_t every = gw->n_running ? LIST_BUSY_NS : LIST_IDLE_NS;

    if (!fleet->connected || clock_ns() - fleet->listed_ns >= every)
        fleet_list(gw);
    if (fleet->connected && !fleet->watching)
        start_watch(fleet);
}

/* ---- figures ---- */

static void on_status(struct grpc_client_call *call, const ProtobufCMessage *message, void *user)
{
    struct fleet *fleet = user;
    size_t len = protobuf_c_message_get_packed_size(message);
    _cleanup_free_ uint8_t *copy = mem_alloc(len + 1, 1);

    if (!copy)
        return;
    protobuf_c_message_pack(message, copy);
    Ember__V1__GetStatusResponse *status = ember__v1__get_status_response__unpack(NULL, len, copy);
    if (!status)
        return;
    ember__v1__get_status_response__free_unpacked(fleet->status, NULL);
    fleet->status = status;
}

static void on_status_end(struct grpc_client_call *call, enum grpc_status status, const char *text,
                          void *user)
{
    struct fleet *fleet = user;

    fleet->asking = NULL;
}

static void ask_status(struct fleet *fleet)
{
    static const struct grpc_client_callbacks callbacks = {on_status, on_status_end};
    Ember__V1__GetStatusRequest request = EMBER__V1__GET_STATUS_REQUEST__INIT;

    fleet->status_ns = clock_ns();
    if (grpc_client_start(fleet->client, "/ember.v1.Ember/GetStatus", &request.base,
                          &ember__v1__get_status_response__descriptor, FLEET_RPC_MS, &callbacks,
                          fleet, &fleet->asking, NULL) < 0)
        fleet->asking = NULL;
}

const Ember__V1__GetStatusResponse *fleet_status(struct gw *gw)
{
    struct fleet *fleet = gw->fleet;

    fleet_freshen(gw);
    if (fleet->connected && !fleet->asking && clock_ns() - fleet->status_ns >= READ_EVERY_NS)
        ask_status(fleet);
    return fleet->status;
}
