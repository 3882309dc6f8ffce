/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models and leases. The state file has a line for each lease, "model id token socket"; a gateway
 * that begins shows these tokens to the instances and goes on with those that accept them, so that
 * a restart, also after SIGKILL, costs no spawn. emberd ends leases whose driver stays away.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/value.h"
#include "daemon/gateway/conn.h"
#include "daemon/gateway/fleet.h"
#include "daemon/gateway/request.h"
#include "kernels/step_io.h"

#define SPAWN_MS 600000 /* a cold model is loaded first; the load outlives the call */
#define RETRY_FIRST_NS UINT64_C(100000000)
#define RETRY_MOST_NS UINT64_C(5000000000)
#define STATE_MAX (1u << 20)

struct spawn {
    struct gw_model *model;
    Ember__V1__SpawnInstanceResponse *response;
};

/* ---- the state file ---- */

static void save_leases(struct gw *gw)
{
    const char *path = gw->options.state_file;
    struct buffer text = {0};
    struct gw_model *model;
    struct conn *conn;

    if (!*path)
        return;
    TAILQ_FOREACH(model, &gw->models, link)
    {
        TAILQ_FOREACH(conn, &model->conns, link)
        if (!conn->failed)
            buffer_printf(&text, "%s %s %s %s\n", model->name, conn->id, conn->token, conn->socket);
    }
    _cleanup_free_ char *fresh = x_printf("%s.new", path);
    _cleanup_fd_ int fd = open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    struct error err = {0};
    int r = fd < 0 ? error_sys(&err, errno, "%s", fresh)
                   : fd_write_all(fd, text.data ? text.data : "", text.len, fresh, &err);
    if (r == 0 && rename(fresh, path) < 0)
        r = error_sys(&err, errno, "%s", path);
    if (r < 0)
        log_warn("leases not noted", "error=\"%s\"", err.text);
    buffer_free(&text);
}

static void read_leases(struct fleet *fleet)
{
    _cleanup_free_ char *text = NULL;
    char *save = NULL;
    size_t len, room = 1;

    if (!*fleet->gw->options.state_file ||
        fd_read_file(fleet->gw->options.state_file, STATE_MAX, &text, &len, NULL) < 0)
        return;
    for (size_t i = 0; i < len; i++)
        room += text[i] == '\n';
    fleet->old = x_alloc(room * sizeof *fleet->old);
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        struct old_lease *l = &fleet->old[fleet->n_old];
        if (sscanf(line, "%ms %ms %ms %ms", &l->model, &l->id, &l->token, &l->socket) == 4)
            fleet->n_old++;
    }
}

static void old_free(struct old_lease *l)
{
    free(l->model);
    free(l->id);
    free(l->token);
    free(l->socket);
    *l = (struct old_lease){0};
}

bool fleet_has_old(const struct fleet *fleet, const char *model)
{
    for (size_t i = 0; i < fleet->n_old; i++)
        if (fleet->old[i].model && !strcmp(fleet->old[i].model, model))
            return true;
    return false;
}

static void take_up(struct gw_model *model)
{
    struct fleet *fleet = model->gw->fleet;

    for (size_t i = 0; i < fleet->n_old; i++) {
        struct old_lease *l = &fleet->old[i];
        struct error err = {0};
        struct conn *conn;
        if (!l->model || strcmp(l->model, model->name))
            continue;
        if (conn_new(model, l->id, l->token, l->socket, &conn, &err) == 0)
            conn->taken_up = true;
        else
            log_info("lease not taken up", "id=%s error=\"%s\"", l->id, err.text);
        old_free(l);
    }
}

/* ---- models ---- */

static void replace(struct gw_model *model);

struct gw_model *fleet_find(struct gw *gw, const char *name)
{
    struct gw_model *model;

    TAILQ_FOREACH(model, &gw->models, link)
    if (model->listed && (!name || !strcmp(model->name, name)))
        return model;
    return NULL;
}

/* What is said of the model now is of another one. Empty texts say nothing. */
static bool differs(const struct gw_model *model, const char *path, const char *digest)
{
    return (*path && strcmp(path, model->path)) ||
           (*digest && *model->digest && strcmp(digest, model->digest));
}

struct gw_model *fleet_model(struct gw *gw, const char *name, const char *path, const char *digest,
                             double load_ms)
{
    struct gw_model *model;

    TAILQ_FOREACH(model, &gw->models, link)
    if (!strcmp(model->name, name))
        break;
    if (model && (differs(model, path, digest) ||
                  (load_ms != model->load_ms && model->text && text_changed(model->text)))) {
        replace(model);
        model = NULL;
    }
    if (model) {
        model->load_ms = load_ms;
        if (*digest && !*model->digest) {
            free(model->digest);
            model->digest = x_strdup(digest);
        }
        return model;
    }
    model = x_alloc(sizeof *model);
    model->digest = x_strdup(digest);
    model->load_ms = load_ms;
    model->gw = gw;
    model->name = x_strdup(name);
    model->path = x_strdup(path);
    model->labels = metrics_labels(name);
    model->max_positions = text_max_positions(path);
    model->policy = policy_of(&gw->options, name);
    TAILQ_INIT(&model->waiting);
    TAILQ_INIT(&model->conns);
    TAILQ_INSERT_TAIL(&gw->models, model, link);
    return model;
}

static int add_to_scheduler(struct gw_model *model, struct error *err)
{
    const struct gateway_options *o = &model->gw->options;
    const struct policy *policy = &model->policy;
    struct sched_model_config config = {
        .page_size = KV_PAGE_SIZE,
        .max_queue = (uint32_t)o->max_queue,
        .step_tokens = (uint32_t)o->step_tokens,
        .prefill_tokens = (uint32_t)o->prefill_tokens,
        .step_ns = o->step_time,
        .no_prefix_cache = !o->prefix_cache,
        .rope_exact_len = model->text->rope_exact_len,
        .stop_ids = model->text->eos,
        .n_stop_ids = model->text->n_eos,
        .stall_ns = o->stall_timeout,
        .wait_target_ns = o->wait_target,
        .backlog_target_ns = o->backlog_target,
        .min_instances = policy->min,
        .max_instances = policy->max,
        .idle_ns = policy->idle_ns,
    };
    return sched_model_add(model->gw->sched, &config, &model->sched, err);
}

static void run_reading(struct work *work)
{
    struct gw_model *model = (struct gw_model *)((char *)work - offsetof(struct gw_model, reading));

    text_load(model->path, model->gw->cache, &model->read, &model->read_error);
}

/* Behind the first requests: the tokenizer is copied out of the cache. */
static void run_settling(struct work *work)
{
    struct gw_model *model =
        (struct gw_model *)((char *)work - offsetof(struct gw_model, settling));

    text_settle(model->text);
}

static void settled(struct work *work)
{
    struct gw_model *model =
        (struct gw_model *)((char *)work - offsetof(struct gw_model, settling));

    model->is_settling = false;
}

static void reading_done(struct work *work)
{
    struct gw_model *model = (struct gw_model *)((char *)work - offsetof(struct gw_model, reading));
    struct error err = model->read_error;

    model->text = TAKE(model->read);
    if (model->text && model->policy.tools >= 0)
        model->text->form.tools = (enum chat_tools)model->policy.tools;
    if (model->text && model->policy.reasoning >= 0)
        model->text->form.reasoning = (enum chat_reasoning)model->policy.reasoning;
    if (model->text && add_to_scheduler(model, &err) < 0) {
        text_free(model->text);
        model->text = NULL;
    }
    model->state = model->text ? GW_MODEL_READY : GW_MODEL_NEW;
    if (!model->text) {
        log_error("model cannot be served", "model=%s error=\"%s\"", model->name, error_text(&err));
    } else {
        char tools[CHAT_NAME_SIZE], reasoning[CHAT_NAME_SIZE];
        log_info("model known", "model=%s vocab=%u chat=%s tool-parser=%s reasoning-parser=%s",
                 model->name, model->text->vocab_size, model->text->chat ? "yes" : "no",
                 chat_tools_name(model->text->form.tools, tools),
                 chat_reasoning_name(model->text->form.reasoning, reasoning));
        if (!model->text->chat)
            log_info("model cannot chat", "model=%s reason=\"%s\"", model->name,
                     error_text(&model->text->chat_error));
        if (!model->replaced)
            take_up(model);
    }
    request_model_ready(model, model->text ? NULL : &err);
    if (model->text) {
        model->settling = (struct work){.run = run_settling, .done = settled};
        model->is_settling = true;
        work_submit(model->gw->work, &model->settling);
    }
    gw_pump(model->gw);
}

void fleet_read_model(struct gw_model *model)
{
    if (model->state != GW_MODEL_NEW)
        return;
    model->state = GW_MODEL_READING;
    model->read_error = (struct error){0};
    model->reading = (struct work){.run = run_reading, .done = reading_done};
    work_submit(model->gw->work, &model->reading);
}

/* ---- leases ---- */

static void ignore_message(struct grpc_client_call *call, const ProtobufCMessage *message,
                           void *user)
{
}

static void stop_done(struct grpc_client_call *call, enum grpc_status status, const char *text,
                      void *user)
{
}

static void stop_instance(struct fleet *fleet, const char *id, bool keep_warm)
{
    static const struct grpc_client_callbacks callbacks = {ignore_message, stop_done};
    Ember__V1__StopInstanceRequest request = EMBER__V1__STOP_INSTANCE_REQUEST__INIT;
    struct grpc_client_call *call;

    request.id = (char *)id;
    request.keep_warm = keep_warm;
    grpc_client_start(fleet->client, "/ember.v1.Ember/StopInstance", &request.base,
                      &ember__v1__stop_instance_response__descriptor, FLEET_RPC_MS, &callbacks,
                      fleet, &call, NULL);
}

/* The scheduler forgets it first: its sequences wait again. */
static void end_conn(struct conn *conn, bool keep_warm)
{
    struct gw_model *model = conn->model;
    struct sched_instance *sched = TAKE(conn->sched);

    if (conn->failed) {
        log_warn("instance lost", "id=%s model=%s reason=\"%s\"", conn->id, model->name, conn->why);
        model->metrics.failovers += sched != NULL;
    } else {
        log_info("instance given back", "id=%s model=%s", conn->id, model->name);
    }
    if (sched)
        sched_instance_gone(sched, conn->died, clock_ns());
    if (sched || !conn->taken_up) /* a token that was refused is no lease of ours */
        stop_instance(model->gw->fleet, conn->id, keep_warm);
    conn_free(conn);
    save_leases(model->gw);
}

/* emberd has another model under its name. */
static void replace(struct gw_model *model)
{
    struct gw *gw = model->gw;

    log_info("model replaced", "model=%s path=%s", model->name, model->path);
    TAILQ_REMOVE(&gw->models, model, link);
    TAILQ_INSERT_TAIL(&gw->replaced, model, link);
    model->replaced = true;
    model->listed = model->asleep = false;
    request_fail_all(model, 503, 1, GW_REPLACED);
    while (!TAILQ_EMPTY(&model->conns))
        end_conn(TAILQ_FIRST(&model->conns), false);
}

void fleet_stalled(struct conn *conn)
{
    conn_fail(conn, true, "a step is overdue");
}

static void back_off(struct gw_model *model)
{
    model->metrics.spawn_failures++;
    model->retry_delay = MIN(MAX(2 * model->retry_delay, RETRY_FIRST_NS), RETRY_MOST_NS);
    model->retry_ns = clock_ns() + model->retry_delay;
}

/* Errors that waiting does not mend: what waits for the model ends now. */
static bool is_final(enum grpc_status status)
{
    return status == GRPC_NOT_FOUND || status == GRPC_INVALID_ARGUMENT ||
           status == GRPC_UNIMPLEMENTED || status == GRPC_DATA_LOSS ||
           status == GRPC_PERMISSION_DENIED || status == GRPC_OUT_OF_RANGE;
}

static void on_spawned(struct grpc_client_call *call, const ProtobufCMessage *message, void *user)
{
    const Ember__V1__SpawnInstanceResponse *r = (const void *)message;
    struct spawn *spawn = user;
    struct gw_model *model = spawn->model;
    struct error err = {0};
    struct conn *conn;

    if (!r->instance || !r->lease)
        return;
    if (!model->replaced && (differs(model, r->instance->model_path, r->instance->model_digest) ||
                             (model->text && text_changed(model->text))))
        replace(model);
    if (model->replaced) { /* since it was asked for */
        stop_instance(model->gw->fleet, r->instance->id, true);
        fleet_list(model->gw);
        return;
    }
    metrics_spawned(&model->metrics, r->from, r->total_ms);
    for (size_t i = 0; i < r->n_phases; i++)
        metrics_phase(&model->metrics, r->phases[i]->name, r->phases[i]->ms);
    model->retry_delay = 0;
    if (conn_new(model, r->instance->id, r->lease->token, r->instance->socket, &conn, &err) < 0) {
        log_warn("instance not reached", "id=%s error=\"%s\"", r->instance->id, err.text);
        back_off(model);
        return;
    }
    save_leases(model->gw);
}

static void on_spawn_done(struct grpc_client_call *call, enum grpc_status status, const char *text,
                          void *user)
{
    struct spawn *spawn = user;
    struct gw_model *model = spawn->model;

    model->starting--;
    free(spawn);
    if (status != GRPC_OK && status != GRPC_CANCELLED) {
        log_warn("no instance", "model=%s status=%s error=\"%s\"", model->name,
                 grpc_status_name(status), text);
        back_off(model);
        if (model->gw->draining)
            fleet_drain(model->gw);
        else if (is_final(status) && TAILQ_EMPTY(&model->conns))
            request_fail_all(model, status == GRPC_NOT_FOUND ? 404 : 503, 0, text);
    }
    gw_pump(model->gw);
}

static void start_spawn(struct gw_model *model)
{
    static const struct grpc_client_callbacks callbacks = {on_spawned, on_spawn_done};
    Ember__V1__SpawnInstanceRequest request = EMBER__V1__SPAWN_INSTANCE_REQUEST__INIT;
    struct spawn *spawn = x_alloc(sizeof *spawn);
    struct grpc_client_call *call;
    struct error err = {0};

    spawn->model = model;
    request.model = model->name;
    request.holder = "ember-gateway";
    model->starting++;
    if (grpc_client_start(model->gw->fleet->client, "/ember.v1.Ember/SpawnInstance", &request.base,
                          &ember__v1__spawn_instance_response__descriptor, SPAWN_MS, &callbacks,
                          spawn, &call, &err) == 0)
        return;
    model->starting--;
    free(spawn);
    log_warn("no instance", "model=%s error=\"%s\"", model->name, err.text);
    back_off(model);
}

static unsigned count_conns(const struct gw_model *model, bool welcomed)
{
    struct conn *conn;
    unsigned n = 0;

    TAILQ_FOREACH(conn, &model->conns, link) n += (conn->sched != NULL) == welcomed;
    return n;
}

static void scale_model(struct gw_model *model, uint64_t now, uint64_t *next)
{
    unsigned coming = model->starting + count_conns(model, false);
    struct sched_scale s = sched_scale(model->sched, coming, now);
    unsigned have = coming + count_conns(model, true);

    while (s.release) {
        end_conn(sched_instance_user(s.release), true);
        s = sched_scale(model->sched, coming, now);
        have = coming + count_conns(model, true);
    }
    *next = MIN(*next, s.recheck);
    if (model->asleep || have >= s.wanted)
        return;
    if (now < model->retry_ns) {
        *next = MIN(*next, model->retry_ns);
        return;
    }
    log_info("instance wanted", "model=%s have=%u wanted=%u why=%s", model->name, have, s.wanted,
             s.why ? s.why : "");
    for (; have < s.wanted && now >= model->retry_ns; have++)
        start_spawn(model);
}

void fleet_scale(struct gw *gw, uint64_t now, uint64_t *ret_next)
{
    struct gw_model *model;

    if (gw->draining && !gw->n_running)
        return;
    TAILQ_FOREACH(model, &gw->models, link)
    if (model->state == GW_MODEL_READY)
        scale_model(model, now, ret_next);
}

static void model_free(struct gw_model *model)
{
    while (!TAILQ_EMPTY(&model->conns))
        conn_free(TAILQ_FIRST(&model->conns));
    text_free(model->text);
    free(model->name);
    free(model->path);
    free(model->digest);
    free(model->labels);
    free(model);
}

/* Requests, spawns, leases and workers hold a model; one that is asleep is to be so when it comes
 * back. */
static bool is_held(const struct gw_model *model)
{
    const struct gw_job *job;

    if (model->listed || model->asleep || model->starting || !TAILQ_EMPTY(&model->conns) ||
        model->state == GW_MODEL_READING || model->is_settling)
        return true;
    TAILQ_FOREACH(job, &model->gw->jobs, link)
    if (job->model == model)
        return true;
    return false;
}

static void forget_gone(struct gw_models *models, uint64_t now)
{
    struct gw_model *model, *next;

    for (model = TAILQ_FIRST(models); model; model = next) {
        next = TAILQ_NEXT(model, link);
        if (is_held(model))
            continue;
        log_info("model forgotten", "model=%s", model->name);
        if (model->sched)
            sched_model_remove(model->sched, now);
        TAILQ_REMOVE(models, model, link);
        model_free(model);
    }
}

/* The scheduler's deadline ends with a request's first step; one that is to be replayed has none.
 */
void fleet_check(struct gw *gw)
{
    uint64_t now = clock_ns(), limit = gw->options.queue_timeout;
    struct gw_model *model;

    TAILQ_FOREACH(model, &gw->models, link)
    {
        if (model->state != GW_MODEL_READY || count_conns(model, true))
            model->driven_ns = now;
        else if (now - model->driven_ns > limit && now > limit)
            request_fail_begun(model, now - limit);
    }
    forget_gone(&gw->models, now);
    forget_gone(&gw->replaced, now);
}

void fleet_drain(struct gw *gw)
{
    struct gw_model *model;

    TAILQ_FOREACH(model, &gw->models, link)
    if (TAILQ_EMPTY(&model->conns) && !model->starting)
        request_fail_all(model, 503, 1, "The server is shutting down.");
}

static bool end_failed(struct gw *gw)
{
    struct gw_model *model;
    struct conn *conn, *next;
    bool any = false;

    TAILQ_FOREACH(model, &gw->models, link)
    {
        for (conn = TAILQ_FIRST(&model->conns); conn; conn = next) {
            next = TAILQ_NEXT(conn, link);
            if (!conn->failed)
                continue;
            any = true;
            end_conn(conn, false);
        }
    }
    return any;
}

void fleet_run(struct gw *gw)
{
    struct sched_instance *instance;
    struct sched_step step;

    do {
        while ((instance = sched_ready(gw->sched))) {
            struct conn *conn = sched_instance_user(instance);
            while (!conn->failed && sched_next_step(instance, clock_ns(), &step))
                conn_send(conn, &step);
        }
    } while (end_failed(gw));
}

/* ---- start and end ---- */

static int where_is_emberd(const struct gateway_options *options, char **ret, struct error *err)
{
    const char *target = options->emberd;

    if (!*target)
        target = getenv("EMBER_SOCKET");
    if (target && *target) {
        *ret = x_strdup(target);
        return 0;
    }
    return value_expand("%t/emberd/emberd.sock", ret, err);
}

int fleet_new(struct gw *gw, struct error *err)
{
    _cleanup_free_ char *target = NULL;
    struct fleet *fleet = x_alloc(sizeof *fleet);

    fleet->gw = gw;
    gw->fleet = fleet;
    int r = policy_check(&gw->options, err);
    if (r == 0)
        r = where_is_emberd(&gw->options, &target, err);
    if (r == 0)
        r = grpc_client_new(gw->base, target, 16 * MIB, &fleet->client, err);
    if (r < 0)
        return r;
    read_leases(fleet);
    fleet_load_folders(fleet);
    fleet_list(gw);
    return 0;
}

/* Sends what is in the client's buffers: StopInstance for each lease. */
static void give_back_all(struct fleet *fleet)
{
    struct gw_model *model;
    uint64_t until = clock_ns() + 200000000;

    TAILQ_FOREACH(model, &fleet->gw->models, link)
    while (!TAILQ_EMPTY(&model->conns))
        end_conn(TAILQ_FIRST(&model->conns), true);
    while (fleet->connected && clock_ns() < until) {
        struct timeval soon = {0, 10000};
        event_base_loopexit(fleet->gw->base, &soon);
        event_base_dispatch(fleet->gw->base);
    }
}

void fleet_free(struct fleet *fleet)
{
    if (!fleet)
        return;
    struct gw *gw = fleet->gw;
    fleet->ending = true;
    give_back_all(fleet);
    grpc_client_free(fleet->client);
    ember__v1__get_status_response__free_unpacked(fleet->status, NULL);
    TAILQ_CONCAT(&gw->models, &gw->replaced, link);
    while (!TAILQ_EMPTY(&gw->models)) {
        struct gw_model *model = TAILQ_FIRST(&gw->models);
        TAILQ_REMOVE(&gw->models, model, link);
        model_free(model);
    }
    for (size_t i = 0; i < fleet->n_old; i++)
        old_free(&fleet->old[i]);
    free(fleet->old);
    free(fleet);
    gw->fleet = NULL;
}
