/* SPDX-License-Identifier: Apache-2.0 */
/* Routes that generate nothing. */
#include <event2/http.h>
#include <stdio.h>
#include <string.h>

#include "daemon/gateway/conn.h"
#include "daemon/gateway/json.h"

static void reply_json(struct http_request *http, struct buffer *out)
{
    http_reply(http, 200, "application/json", out->data, out->len);
}

static void health(struct gw *gw, struct http_request *http, struct buffer *out)
{
    if (gw->draining)
        http_fail(http, 503, NULL, "shutting_down", NULL, 1, "The server is shutting down.");
    else if (!fleet_connected(gw))
        http_fail(http, 503, NULL, "emberd_unavailable", NULL, 1, "emberd cannot be reached.");
    else
        http_reply(http, 200, NULL, NULL, 0);
}

static void ping(struct gw *gw, struct http_request *http, struct buffer *out)
{
    http_reply(http, 200, NULL, NULL, 0);
}

static void version(struct gw *gw, struct http_request *http, struct buffer *out)
{
    js_raw(out, "{\"version\":\"" EMBER_VERSION "\"}");
    reply_json(http, out);
}

static void load(struct gw *gw, struct http_request *http, struct buffer *out)
{
    js_printf(out, "{\"server_load\":%u}", gw->n_jobs);
    reply_json(http, out);
}

/* The page's memory is kept: to get it from the system costs as much as to fill it. */
static void metrics(struct gw *gw, struct http_request *http, struct buffer *out)
{
    static struct buffer page;

    page.len = 0;
    metrics_print(gw, &page);
    http_reply(http, 200, "text/plain; version=0.0.4; charset=utf-8", page.data, page.len);
}

static void model_object(const struct gw_model *model, struct buffer *out)
{
    js_raw(out, "{\"id\":");
    js_cstring(out, model->name);
    js_printf(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"emberd\",\"root\":",
              (long long)model->gw->started);
    js_cstring(out, model->name);
    js_raw(out, ",\"parent\":null,\"max_model_len\":");
    if (model->max_positions)
        js_printf(out, "%u", model->max_positions);
    else
        js_raw(out, "null");
    js_raw(out, ",\"permission\":[]}");
}

/* An empty list would be a lie as long as nobody has told us. True: the reply has been sent. */
static bool unlisted(struct gw *gw, struct http_request *http)
{
    if (fleet_listed(gw))
        return false;
    http_fail(http, 503, NULL, "emberd_unavailable", NULL, 1,
              "emberd has not said yet which models there are.");
    return true;
}

static void models(struct gw *gw, struct http_request *http, struct buffer *out)
{
    const struct gw_model *model;
    bool first = true;

    if (unlisted(gw, http))
        return;
    fleet_freshen(gw);
    js_raw(out, "{\"object\":\"list\",\"data\":[");
    TAILQ_FOREACH(model, &gw->models, link)
    {
        if (!model->listed)
            continue;
        if (!first)
            js_raw(out, ",");
        model_object(model, out);
        first = false;
    }
    js_raw(out, "]}");
    reply_json(http, out);
}

static void one_model(struct gw *gw, struct http_request *http, struct buffer *out)
{
    /* Clients encode the slash of a name, or do not. */
    _cleanup_free_ char *name = evhttp_uridecode(http_path(http) + strlen("/v1/models/"), 0, NULL);
    const struct gw_model *model = name ? fleet_find(gw, name) : NULL;

    if (!model && unlisted(gw, http))
        return;
    if (!model) {
        http_fail(http, 404, NULL, "model_not_found", "model", 0, "The model does not exist.");
        return;
    }
    model_object(model, out);
    reply_json(http, out);
}

/*
 * Which models a request means: ?model=NAME, or all. False: no such model; the reply has been sent.
 * *ret NULL: all.
 */
static bool chosen(struct gw *gw, struct http_request *http, struct gw_model **ret)
{
    char name[256] = "";

    *ret = NULL;
    if (!http_query(http, "model", name, sizeof name))
        return true;
    *ret = fleet_find(gw, name);
    if (!*ret)
        http_fail(http, 404, NULL, "model_not_found", "model", 0, "The model does not exist.");
    return *ret != NULL;
}

/* Sleep: instances are drained and given back; requests wait until somebody wakes it up. One that
 * is on its way drains as it comes (conn.c). */
static void set_asleep(struct gw *gw, struct http_request *http, bool asleep)
{
    struct gw_model *model, *one;
    struct conn *conn;

    if (!chosen(gw, http, &one))
        return;
    TAILQ_FOREACH(model, &gw->models, link)
    {
        if (one && model != one)
            continue;
        model->asleep = asleep;
        TAILQ_FOREACH(conn, &model->conns, link)
        if (conn->sched)
            (asleep ? sched_instance_drain : sched_instance_resume)(conn->sched);
    }
    gw_pump(gw);
    http_reply(http, 200, NULL, NULL, 0);
}

static void sleep_route(struct gw *gw, struct http_request *http, struct buffer *out)
{
    set_asleep(gw, http, true);
}

static void wake_route(struct gw *gw, struct http_request *http, struct buffer *out)
{
    set_asleep(gw, http, false);
}

static void reset_cache(struct gw *gw, struct http_request *http, struct buffer *out)
{
    struct gw_model *model, *one;

    if (!chosen(gw, http, &one))
        return;
    TAILQ_FOREACH(model, &gw->models, link)
    if (!one || model == one)
        model->cache_epoch++;
    http_reply(http, 200, NULL, NULL, 0);
}

/* Asleep means no instance runs any more, not that somebody has asked for it. */
static void is_sleeping(struct gw *gw, struct http_request *http, struct buffer *out)
{
    struct gw_model *model, *one;
    bool asleep = false;

    if (!chosen(gw, http, &one))
        return;
    TAILQ_FOREACH(model, &gw->models, link)
    if (!one || model == one)
        asleep |= model->asleep && TAILQ_EMPTY(&model->conns);
    js_raw(out, "{\"is_sleeping\":");
    js_bool(out, asleep);
    js_raw(out, "}");
    reply_json(http, out);
}

static const struct route {
    const char *method, *path;
    bool admin;
    void (*serve)(struct gw *gw, struct http_request *http, struct buffer *out);
} routes[] = {
    {"GET", "/health", false, health},
    {"GET", "/ping", false, ping},
    {"POST", "/ping", false, ping},
    {"GET", "/version", false, version},
    {"GET", "/load", false, load},
    {"GET", "/metrics", false, metrics},
    {"GET", "/v1/models", false, models},
    {"POST", "/sleep", true, sleep_route},
    {"POST", "/wake_up", true, wake_route},
    {"GET", "/is_sleeping", true, is_sleeping},
    {"POST", "/reset_prefix_cache", true, reset_cache},
};

/* What may be done with a path, for Allow. */
static void methods_of(const struct gw *gw, const char *path, char *text, size_t room)
{
    *text = 0;
    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        if (strcmp(path, routes[i].path) || (routes[i].admin && !gw->options.admin))
            continue;
        size_t n = strlen(text);
        snprintf(text + n, room - n, "%s, ",
                 strcmp(routes[i].method, "GET") ? routes[i].method : "GET, HEAD");
    }
    size_t n = strlen(text);
    snprintf(text + n, room - n, "OPTIONS");
}

bool admin_handle(struct gw *gw, struct http_request *http)
{
    const char *path = http_path(http), *method = http_method(http);
    char allow[64] = "GET, HEAD, OPTIONS";
    bool one = !strncmp(path, "/v1/models/", strlen("/v1/models/")), known = one;
    struct buffer out = {0};

    if (one && !strcmp(method, "GET")) {
        one_model(gw, http, &out);
        buffer_free(&out);
        return true;
    }
    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        if (strcmp(path, routes[i].path) || (routes[i].admin && !gw->options.admin))
            continue;
        known = true;
        if (strcmp(method, routes[i].method))
            continue;
        routes[i].serve(gw, http, &out);
        buffer_free(&out);
        return true;
    }
    if (!known)
        return false;
    if (!one)
        methods_of(gw, path, allow, sizeof allow);
    http_not_allowed(http, allow);
    return true;
}
