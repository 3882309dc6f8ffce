/* SPDX-License-Identifier: Apache-2.0 */
/* emberctl load, unload, models. */
#include "cli/commands.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/control.h"
#include "cli/output.h"
#include "cli/protojson.h"
#include "cli/quant_options.h"
#include "model/model.h"

static const struct column model_columns[] = {{"name", "MODEL", COLUMN_TEXT},
                                              {"architecture", "ARCHITECTURE", COLUMN_TEXT},
                                              {"warmth", "STATE", COLUMN_TEXT},
                                              {"quant", "QUANTISED", COLUMN_TEXT},
                                              {"from_pack", "FROM PACK", COLUMN_TEXT},
                                              {"parameters", "PARAMETERS", COLUMN_NUMBER},
                                              {"weights_bytes", "WEIGHTS", COLUMN_BYTES},
                                              {"instance_bytes", "PER INSTANCE", COLUMN_BYTES},
                                              {"standby", "STANDBY", COLUMN_NUMBER},
                                              {"leased", "LEASED", COLUMN_NUMBER},
                                              {"load_ms", "LOADED IN", COLUMN_MS},
                                              {"error", "ERROR", COLUMN_TEXT},
                                              {0}};

struct load_view {
    struct progress progress;
    json_t *model; /* of the last message */
    const struct verb_call *call;
};

static int on_progress(void *ctx, const ProtobufCMessage *message)
{
    const Ember__V1__LoadProgress *p = (const Ember__V1__LoadProgress *)message;
    struct load_view *view = ctx;

    progress_update(&view->progress, p->phase, p->bytes_done, p->bytes_total);
    if (p->model) {
        json_decref(view->model);
        view->model = model_json(p->model);
    }
    return verb_flag(view->call, "detach") && p->warmth == EMBER__V1__WARMTH__LOADING;
}

/* The daemon has another working directory: it gets the whole path of what exists here. */
static char *absolute(const char *path)
{
    char *whole = realpath(path, NULL);
    return whole ? whole : x_strdup(path);
}

int run_load(const struct verb_call *call)
{
    _cleanup_(control_freep) struct control *control = NULL;
    _cleanup_free_ char *path = absolute(call->argv[0]);
    Ember__V1__LoadModelRequest request = EMBER__V1__LOAD_MODEL_REQUEST__INIT;
    struct load_view view = {.call = call};
    _cleanup_free_ char *quant = NULL;
    struct error err = {0};

    cli_catch_interrupts();
    request.path = path;
    request.name = (char *)(verb_string(call, "name") ? verb_string(call, "name") : "");
    if (verb_given(call, "standby"))
        request.standby_asked_case = EMBER__V1__LOAD_MODEL_REQUEST__STANDBY_ASKED_STANDBY;
    request.standby = (uint32_t)verb_int(call, "standby");
    request.kv_bytes = verb_bytes(call, "kv-bytes");
    if (cli_quant(call, &quant, &err) < 0)
        return cli_fail(call, &err);
    request.quant = verb_given(call, "quant") && !*quant ? (char *)"none" : quant;
    if (verb_given(call, "kv-type"))
        request.kv_type = (char *)kv_kind_name((enum kv_kind)verb_choice(call, "kv-type"));
    progress_begin(&view.progress, call, call->argv[0]);
    int r = control_open(call, &control, &err);
    if (r == 0)
        r = control_stream(control, "LoadModel", &request.base,
                           &ember__v1__load_progress__descriptor, on_progress, &view, &err);
    progress_end(&view.progress);
    if (r < 0) {
        json_decref(view.model);
        return cli_fail(call, &err);
    }
    if (cli_interrupted) {
        fprintf(stderr, "emberctl: interrupted; the daemon goes on loading (emberctl models)\n");
        json_decref(view.model);
        return CLI_INTERRUPTED;
    }
    if (!view.model) {
        fprintf(stderr, "loading in the background (emberctl models)\n");
        return CLI_OK;
    }
    static const struct column columns[] = {{"name", "model", 0},
                                            {"architecture", "architecture", 0},
                                            {"warmth", "state", 0},
                                            {"quant", "quantised as", 0},
                                            {"from_pack", "from a pack", 0},
                                            {"parameters", "parameters", COLUMN_NUMBER},
                                            {"weights_bytes", "weights", COLUMN_BYTES},
                                            {"load_ms", "loaded in", COLUMN_MS},
                                            {"digest", "digest", 0},
                                            {0}};
    const char *notice = json_string_value(json_object_get(view.model, "notice"));
    if (notice && *notice)
        fprintf(stderr, "emberctl: loaded, but %s\n", notice);
    return cli_print_object(call, view.model, columns);
}

int run_unload(const struct verb_call *call)
{
    static const struct column columns[] = {
        {"model", "unloaded", 0}, {"bytes_freed", "memory freed", COLUMN_BYTES}, {0}};
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__UnloadModelRequest request = EMBER__V1__UNLOAD_MODEL_REQUEST__INIT;
    Ember__V1__UnloadModelResponse *response = NULL;
    struct error err = {0};

    request.name = call->argv[0];
    request.force = verb_flag(call, "force");
    int r = control_open(call, &control, &err);
    if (r == 0)
        r = control_call(control, "UnloadModel", &request.base,
                         &ember__v1__unload_model_response__descriptor, 60000, &response, &err);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *json = json_pack("{s:s, s:I}", "model", call->argv[0], "bytes_freed",
                             (json_int_t)response->bytes_freed);
    protobuf_c_message_free_unpacked(&response->base, NULL);
    return cli_print_object(call, json, columns);
}

int run_models(const struct verb_call *call)
{
    _cleanup_(control_freep) struct control *control = NULL;
    Ember__V1__ListModelsRequest request = EMBER__V1__LIST_MODELS_REQUEST__INIT;
    Ember__V1__ListModelsResponse *response = NULL;
    struct error err = {0};

    int r = control_open(call, &control, &err);
    if (r == 0)
        r = control_call(control, "ListModels", &request.base,
                         &ember__v1__list_models_response__descriptor, 10000, &response, &err);
    if (r < 0)
        return cli_fail(call, &err);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_models; i++)
        json_array_append_new(list, model_json(response->models[i]));
    protobuf_c_message_free_unpacked(&response->base, NULL);
    return cli_print_list(call, list, model_columns, "no models; load one: emberctl load DIR");
}
