/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl spawn, stop, ps, status. */
#include "cli/commands.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cli/control.h"
#include "cli/output.h"
#include "cli/protojson.h"

static void print_phases(const json_t *phases)
{
    size_t i;
    json_t *phase;
    char buf[24];

    json_array_foreach(phases, i, phase)
        printf("  %-10s  %s\n", json_string_value(json_object_get(phase, "name")),
               cli_ms(json_number_value(json_object_get(phase, "ms")), buf));
}

int run_spawn(const struct verb_call *call)
{
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__SpawnInstanceRequest request = EMBER__V1__SPAWN_INSTANCE_REQUEST__INIT;
    Ember__V1__SpawnInstanceResponse *response = NULL;
    struct progress progress;
    struct error err = {0};
    char buf[24];

    request.model = call->argc ? call->argv[0] : "";
    request.lease_ttl_ms = verb_duration(call, "ttl") / 1000000;
    request.holder = (char *)verb_string(call, "holder");
    int r = control_open(call, &control, &err);
    progress_wait(&progress, call, call->argc ? call->argv[0] : NULL);
    if (r == 0)
        r = control_call(control, "SpawnInstance", &request.base,
                         &ember__v1__spawn_instance_response__descriptor,
                         (int)MIN(verb_duration(call, "timeout") / 1000000, INT_MAX), &response,
                         &err);
    progress_end(&progress);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *json = message_json(&response->base);
    protobuf_c_message_free_unpacked(&response->base, NULL);
    if (cli_json(call)) {
        static const struct column none[] = {{0}};
        return cli_print_object(call, json, none);
    }
    json_t *instance = json_object_get(json, "instance"), *lease = json_object_get(json, "lease");
    printf("%s  READY in %s, from %s\n", json_string_value(json_object_get(instance, "id")),
           cli_ms(json_number_value(json_object_get(json, "total_ms")), buf),
           json_string_value(json_object_get(json, "from")));
    print_phases(json_object_get(json, "phases"));
    printf("socket  %s\nlease   %s, for %lld s\n",
           json_string_value(json_object_get(instance, "socket")),
           json_string_value(json_object_get(lease, "token")),
           (long long)json_integer_value(json_object_get(lease, "ttl_ms")) / 1000);
    json_decref(json);
    return CLI_OK;
}

int run_stop(const struct verb_call *call)
{
    _cleanup_(control_freep) struct control *control = NULL;
    struct error err = {0};

    json_t *stopped = json_array();
    int r = control_open(call, &control, &err);
    for (int i = 0; i < call->argc && r == 0; i++) {
        Ember__V1__StopInstanceRequest request = EMBER__V1__STOP_INSTANCE_REQUEST__INIT;
        Ember__V1__StopInstanceResponse *response = NULL;
        request.id = call->argv[i];
        request.keep_warm = verb_flag(call, "keep-warm");
        r = control_call(control, "StopInstance", &request.base,
                         &ember__v1__stop_instance_response__descriptor, 30000, &response, &err);
        if (r < 0)
            break;
        protobuf_c_message_free_unpacked(&response->base, NULL);
        json_array_append_new(stopped, json_string(call->argv[i]));
    }
    if (cli_json(call)) /* also when one failed: those before it are stopped */
        cli_print_json(json_pack("{s:O}", "stopped", stopped));
    json_decref(stopped);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}

int run_ps(const struct verb_call *call)
{
    static const struct column columns[] = {{"id", "INSTANCE", COLUMN_TEXT},
                                            {"model", "MODEL", COLUMN_TEXT},
                                            {"warmth", "STATE", COLUMN_TEXT},
                                            {"pid", "PID", COLUMN_NUMBER},
                                            {"bytes", "OWN MEMORY", COLUMN_BYTES},
                                            {"start_ms", "STARTED IN", COLUMN_MS},
                                            {"age_seconds", "AGE", COLUMN_SECONDS},
                                            {"lease_holder", "HOLDER", COLUMN_TEXT},
                                            {"driver_connected", "DRIVEN", COLUMN_TEXT},
                                            {0}};
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__ListInstancesRequest request = EMBER__V1__LIST_INSTANCES_REQUEST__INIT;
    Ember__V1__ListInstancesResponse *response = NULL;
    struct error err = {0};

    request.model = call->argc ? call->argv[0] : "";
    int r = control_open(call, &control, &err);
    if (r == 0)
        r = control_call(control, "ListInstances", &request.base,
                         &ember__v1__list_instances_response__descriptor, 10000, &response, &err);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_instances; i++)
        json_array_append_new(list, instance_json(response->instances[i]));
    protobuf_c_message_free_unpacked(&response->base, NULL);
    return cli_print_list(call, list, columns, "no instances");
}

int run_status(const struct verb_call *call)
{
    static const struct column columns[] = {{"version", "version", 0},
                                            {"pid", "pid", 0},
                                            {"uptime_seconds", "up for", COLUMN_SECONDS},
                                            {"backend", "backend", 0},
                                            {"memory_budget", "memory budget", COLUMN_BYTES},
                                            {"memory_weights", "weights", COLUMN_BYTES},
                                            {"memory_instances", "instances", COLUMN_BYTES},
                                            {"memory_reserved", "reserved", COLUMN_BYTES},
                                            {"own_rss", "emberd itself", COLUMN_BYTES},
                                            {"models", "models", 0},
                                            {"standby", "standby instances", 0},
                                            {"leased", "leased instances", 0},
                                            {"starting", "starting instances", 0},
                                            {"spawns", "spawns", 0},
                                            {"spawns_from_pool", "spawns from the pool", 0},
                                            {"spawn_failures", "failed spawns", 0},
                                            {"loads", "loads", 0},
                                            {"load_failures", "failed loads", 0},
                                            {"packs", "packs written", 0},
                                            {"evictions", "evictions", 0},
                                            {"instances_lost", "instances lost", 0},
                                            {"cache_dir", "cache", 0},
                                            {"draining", "draining", 0},
                                            {"gateway.state", "gateway", 0},
                                            {"gateway.listen", "gateway listens on", 0},
                                            {"gateway.restarts", "gateway restarts", 0},
                                            {"gateway.error", "gateway's last error", 0},
                                            {0}};
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__GetStatusRequest request = EMBER__V1__GET_STATUS_REQUEST__INIT;
    Ember__V1__GetStatusResponse *response = NULL;
    struct error err = {0};

    int r = control_open(call, &control, &err);
    if (r == 0)
        r = control_call(control, "GetStatus", &request.base,
                         &ember__v1__get_status_response__descriptor, 10000, &response, &err);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *json = message_json(&response->base);
    protobuf_c_message_free_unpacked(&response->base, NULL);
    return cli_print_object(call, json, columns);
}
