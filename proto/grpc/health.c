/* SPDX-License-Identifier: Apache-2.0 */
/* grpc.health.v1: Check and Watch over a table of service names. */
#include <errno.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "proto/grpc/server-internal.h"

typedef Grpc__Health__V1__HealthCheckRequest health_request;
typedef Grpc__Health__V1__HealthCheckResponse health_response;

extern const uint8_t grpc_health_v1_protoset[];
extern const size_t grpc_health_v1_protoset_size;

static struct health_entry *find(struct grpc_server *server, const char *service)
{
    struct health_entry *entry;

    LIST_FOREACH(entry, &server->health, link)
    if (!strcmp(entry->service, service))
        return entry;
    return NULL;
}

static void on_check(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const health_request *request = (const health_request *)message;
    const struct health_entry *entry = find(user, request->service);
    health_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    if (!entry) {
        grpc_call_finish(call, GRPC_NOT_FOUND, "the health of this service is not known here");
        return;
    }
    response.status = (Grpc__Health__V1__HealthCheckResponse__ServingStatus)entry->health;
    grpc_call_reply(call, &response.base);
}

static void tell(struct health_watch *watch)
{
    const struct health_entry *entry = find(watch->server, watch->service);
    health_response response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    response.status =
        entry ? (Grpc__Health__V1__HealthCheckResponse__ServingStatus)entry->health
              : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN;
    grpc_call_send(watch->call, &response.base);
}

static void watch_free(struct health_watch *watch)
{
    LIST_REMOVE(watch, link);
    free(watch->service);
    free(watch);
}

static void on_watch_cancelled(struct grpc_call *call, void *user)
{
    watch_free(user);
}

static void on_watch(struct grpc_call *call, const ProtobufCMessage *message, void *user)
{
    const health_request *request = (const health_request *)message;
    struct grpc_server *server = user;

    if (server->stopping) {
        grpc_call_finish(call, GRPC_UNAVAILABLE, "the server is shutting down");
        return;
    }
    struct health_watch *watch = mem_alloc(1, sizeof *watch);
    char *service = strdup(request->service);
    if (!watch || !service) {
        free(watch);
        free(service);
        grpc_call_finish(call, GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    *watch = (struct health_watch){.call = call, .server = server, .service = service};
    LIST_INSERT_HEAD(&server->watches, watch, link);
    grpc_call_on_cancel(call, on_watch_cancelled, watch);
    tell(watch);
}

int grpc_server_set_health(struct grpc_server *server, const char *service, enum grpc_health health)
{
    struct health_entry *entry = find(server, service);
    struct health_watch *watch;

    if (entry && entry->health == health)
        return 0;
    if (!entry) {
        entry = mem_alloc(1, sizeof *entry);
        if (!entry)
            return -ENOMEM;
        entry->service = x_strdup(service);
        LIST_INSERT_HEAD(&server->health, entry, link);
    }
    entry->health = health;
    LIST_FOREACH(watch, &server->watches, link)
    if (!strcmp(watch->service, service))
        tell(watch);
    return 0;
}

int health_init(struct grpc_server *server, struct error *err)
{
    static const struct grpc_method methods[] = {{"Check", GRPC_UNARY, on_check},
                                                 {"Watch", GRPC_SERVER_STREAM, on_watch}};

    int r = grpc_server_add_service(server, &grpc__health__v1__health__descriptor, methods,
                                    ARRAY_LEN(methods), server, err);
    if (r == 0)
        r = grpc_server_set_health(server, "", GRPC_HEALTH_SERVING);
    if (r == 0)
        r = grpc_server_add_protoset(server, grpc_health_v1_protoset, grpc_health_v1_protoset_size,
                                     err);
    return r;
}

/* At shutdown: everything NOT_SERVING, and the watches end, or no connection ever would. */
void health_stop(struct grpc_server *server)
{
    struct health_entry *entry;

    LIST_FOREACH(entry, &server->health, link)
    grpc_server_set_health(server, entry->service, GRPC_HEALTH_NOT_SERVING);
    while (!LIST_EMPTY(&server->watches)) {
        struct health_watch *watch = LIST_FIRST(&server->watches);
        grpc_call_finish(watch->call, GRPC_UNAVAILABLE, "the server is shutting down");
        watch_free(watch);
    }
}

void health_free(struct grpc_server *server)
{
    while (!LIST_EMPTY(&server->watches))
        watch_free(LIST_FIRST(&server->watches));
    while (!LIST_EMPTY(&server->health)) {
        struct health_entry *entry = LIST_FIRST(&server->health);
        LIST_REMOVE(entry, link);
        free(entry->service);
        free(entry);
    }
}
