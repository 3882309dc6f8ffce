/* SPDX-License-Identifier: Apache-2.0 */
/* Models: what is registered, how a load goes, what is resident. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/utf8.h"
#include "daemon/manager/manager.h"
#include "kernels/plan.h"
#include "model/quant/rules.h"

#define KV_BYTES_MOST (512 * MIB)
#define KV_TOKENS_DEFAULT 8192 /* of an instance when kv_bytes is not configured */
#define KV_PAGES_LEAST 64
#define OWN_BYTES_GUESS (16 * MIB) /* of an instance beside its KV, until one has been measured */
#define MODELS_MOST 4096
#define LOAD_RATE_GUESS 0.5e9 /* bytes a second of a load that has just begun */
#define EARLY_SECONDS 20.0    /* drivers give a step a minute (stall_timeout of the gateway) */
#define LOADER_EXIT_NS UINT64_C(5000000000)

/* ---- the table ---- */

int mgr_model_name_of(const char *path, char name[MGR_NAME_MAX + 1], struct error *err)
{
    size_t len = strlen(path);

    while (len && path[len - 1] == '/')
        len--;
    size_t start = len;
    while (start && path[start - 1] != '/')
        start--;
    if (len - start > 5 && !strncmp(path + len - 5, ".pack", 5))
        len -= 5;
    if (start == len || len - start > MGR_NAME_MAX)
        return error_set(err, EINVAL, "%s: its last component is no name for a model; give one",
                         path);
    memcpy(name, path + start, len - start);
    name[len - start] = 0;
    return 0;
}

int mgr_model_path_check(const char *path, char **ret, struct error *err)
{
    size_t len = strlen(path);

    if (path[0] != '/')
        return error_set(err, EINVAL,
                         "\"%s\" is not an absolute path; the daemon's working directory is not "
                         "yours, give the path from / on",
                         path);
    if (len >= 4096)
        return error_set(err, EINVAL, "a path of %zu bytes; at most 4095 are possible", len);
    if (!utf8_valid(path)) /* it stands in every list of models, whose readers refuse other bytes */
        return error_set(err, EINVAL, "%s: the path is not UTF-8; rename the folder", path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    *ret = x_strndup(path, len);
    return 0;
}

static int check_name(const char *name, struct error *err)
{
    size_t len = strlen(name);

    if (!len || len > MGR_NAME_MAX)
        return error_set(err, EINVAL, "a model's name has 1 to %d bytes, this one has %zu",
                         MGR_NAME_MAX, len);
    if (!utf8_valid(name))
        return error_set(err, EINVAL, "a model's name is UTF-8, this one is not");
    for (size_t i = 0; i < len; i++) /* C2 80 to C2 9F are control characters as well */
        if ((unsigned char)name[i] <= 0x20 || name[i] == 0x7f ||
            ((unsigned char)name[i] == 0xc2 && (unsigned char)name[i + 1] < 0xa0))
            return error_set(err, EINVAL,
                             "a model's name has no blanks or control characters; choose another");
    return 0;
}

struct mgr_model *mgr_model_find(struct mgr *mgr, const char *name)
{
    struct mgr_model *model;

    if (!*name)
        return mgr->default_model;
    TAILQ_FOREACH(model, &mgr->models, link)
    if (!strcmp(model->name, name))
        return model;
    return NULL;
}

static int rebind(struct mgr_model *model, const char *path, struct error *err)
{
    if (!strcmp(model->path, path))
        return 0;
    if (model->state != MODEL_COLD && model->state != MODEL_FAILED)
        return error_set(err, EEXIST,
                         "the name \"%s\" belongs to %s; unload that first or choose another name",
                         model->name, model->path);
    free(model->path);
    model->path = x_strdup(path);
    model->own_bytes = 0;
    return 0;
}

int mgr_model_set_quant(struct mgr_model *model, const char *quant, struct error *err)
{
    if (!*quant)
        return 0;
    if (strlen(quant) > QUANTIZE_TEXT_MAX ||
        !utf8_valid(quant)) /* the loader reads the rest of it */
        return error_set(err, EINVAL, "quant: %zu bytes; rules have at most %d, of UTF-8",
                         strlen(quant), QUANTIZE_TEXT_MAX);
    if (!strcmp(quant, "none"))
        quant = "";
    if (!strcmp(model->quant, quant))
        return 0;
    if (model->state != MODEL_COLD && model->state != MODEL_FAILED)
        return error_set(err, EEXIST,
                         "model %s is there already, %s; unload it first, or load the folder under "
                         "another name",
                         model->name, *model->quant ? "quantised otherwise" : "as it is on disk");
    free(model->quant);
    model->quant = x_strdup(quant);
    model->own_bytes = 0;
    return 0;
}

void mgr_model_forget(struct mgr_model *model)
{
    if ((model->state != MODEL_COLD && model->state != MODEL_FAILED) || model->configured ||
        mgr_model_wanted(model) || !TAILQ_EMPTY(&model->unloads))
        return;
    if (model->loader)
        model->forgotten = true;
    else
        mgr_model_free(model);
}

/* Names that never led to anything must not fill the table. */
static void forget_failed(struct mgr *mgr)
{
    struct mgr_model *next;

    for (struct mgr_model *m = TAILQ_FIRST(&mgr->models); m; m = next) {
        next = TAILQ_NEXT(m, link);
        if (m->state == MODEL_FAILED)
            mgr_model_forget(m);
    }
}

int mgr_model_register(struct mgr *mgr, const char *name, const char *path, struct mgr_model **ret,
                       struct error *err)
{
    struct mgr_model *model;
    int r = check_name(name, err);

    if (r < 0)
        return r;
    model = mgr_model_find(mgr, name);
    if (model) {
        r = rebind(model, path, err);
        if (r == 0)
            *ret = model;
        return r;
    }
    if (mgr->n_models >= MODELS_MOST)
        forget_failed(mgr);
    if (mgr->n_models >= MODELS_MOST)
        return error_set(err, ENOMEM, "%d models are registered, unload some twice to forget them",
                         MODELS_MOST);
    model = x_alloc(sizeof *model);
    model->mgr = mgr;
    snprintf(model->name, sizeof model->name, "%s", name);
    model->path = x_strdup(path);
    model->quant = x_strdup("");
    model->weights_fd = model->manifest_fd = -1;
    for (size_t i = 0; i < ARRAY_LEN(model->early_fds); i++)
        model->early_fds[i] = -1;
    model->standby = -1;
    model->kv_kind = -1;
    model->phase = "";
    TAILQ_INIT(&model->waiting);
    TAILQ_INIT(&model->loads);
    TAILQ_INIT(&model->unloads);
    TAILQ_INSERT_TAIL(&mgr->models, model, link);
    mgr->n_models++;
    *ret = model;
    return 0;
}

void mgr_model_free(struct mgr_model *model)
{
    TAILQ_REMOVE(&model->mgr->models, model, link);
    model->mgr->n_models--;
    fd_close(model->weights_fd);
    fd_close(model->manifest_fd);
    free(model->path);
    free(model->quant);
    free(model);
}

static void check_invariants(const struct mgr_model *model)
{
    bool parked = model->state == MODEL_PARKED;
    uint32_t instances = 0;

    for (int i = 0; i < INSTANCE_GONE; i++)
        instances += model->instances[i];
    if ((model->weights_fd >= 0) != parked || (model->manifest_fd >= 0) != parked ||
        (instances && !mgr_model_startable(model) && model->state != MODEL_LEAVING) ||
        (model->early && model->state != MODEL_LOADING) ||
        (model->charged && (model->state == MODEL_COLD || model->state == MODEL_FAILED)) ||
        (model->loader == NULL && model->state == MODEL_LOADING)) {
        log_error("model in an impossible state", "model=%s state=%d instances=%u charged=%llu",
                  model->name, model->state, instances, (unsigned long long)model->charged);
        abort();
    }
}

static void mgr_model_set_state(struct mgr_model *model, enum model_state state)
{
    static const unsigned from[] = {
#define X(id, warmth, allowed) [id] = allowed,
        MGR_MODEL_STATES(X)
#undef X
    };

    if (!(from[state] & BIT(model->state))) {
        log_error("impossible transition of a model", "model=%s from=%d to=%d", model->name,
                  model->state, state);
        abort();
    }
    model->state = state;
    model->used_ns = clock_ns();
    check_invariants(model);
    mgr_settle_soon(model->mgr);
}

/* ---- numbers ---- */

bool mgr_model_startable(const struct mgr_model *model)
{
    return model->state == MODEL_PARKED || (model->state == MODEL_LOADING && model->early);
}

bool mgr_model_early(const struct mgr_model *model)
{
    double seconds = clock_ms_since(model->admitted_ns) / 1e3, rate = LOAD_RATE_GUESS;

    if (!model->early || model->state != MODEL_LOADING)
        return false;
    if (seconds > 0.25 && model->bytes_done)
        rate = (double)model->bytes_done / seconds;
    return (double)(model->weights_bytes - model->bytes_done) / rate <= EARLY_SECONDS;
}

bool mgr_model_wanted(const struct mgr_model *model)
{
    return model->wanted || model->n_waiting || !TAILQ_EMPTY(&model->loads);
}

uint32_t mgr_model_target(const struct mgr_model *model)
{
    return (uint32_t)(model->standby >= 0 ? model->standby : model->mgr->options.standby);
}

enum kv_kind mgr_model_kv_kind(const struct mgr_model *model)
{
    return model->kv_kind >= 0 ? (enum kv_kind)model->kv_kind
                               : (enum kv_kind)model->mgr->options.kv_type;
}

/* Enough for KV_TOKENS_DEFAULT tokens, KV_BYTES_MOST or an eighth of the budget at most, never
 * absurdly few. */
uint64_t mgr_model_kv_bytes(const struct mgr_model *model)
{
    uint64_t page = model->kv_page_bytes[mgr_model_kv_kind(model)], bytes, least;

    if (model->kv_asked)
        return model->kv_asked;
    if (model->mgr->options.kv_bytes)
        return model->mgr->options.kv_bytes;
    if (!page || !size_mul(page, KV_TOKENS_DEFAULT / KV_PAGE_SIZE, &bytes))
        return 64 * MIB;
    least = page * KV_PAGES_LEAST;
    return MAX(least, MIN(bytes, MIN(mgr_budget(model->mgr) / 8, KV_BYTES_MOST)));
}

uint64_t mgr_model_instance_bytes(const struct mgr_model *model)
{
    uint64_t sum;

    if (model->own_bytes)
        return model->own_bytes;
    return size_add(mgr_model_kv_bytes(model), OWN_BYTES_GUESS, &sum) ? sum : UINT64_MAX;
}

/* ---- loading ---- */

/* Nothing is attached to the load any more from here on; those who are find out from its page. */
static void end_early(struct mgr_model *model, bool failed)
{
    if (model->early && failed)
        filling_fail(model->early);
    filling_free(TAKE(model->early));
    for (size_t i = 0; i < ARRAY_LEN(model->early_fds); i++)
        model->early_fds[i] = fd_close(model->early_fds[i]);
}

static void stop_instances(struct mgr_model *model, const char *reason)
{
    struct mgr_instance *instance;

    TAILQ_FOREACH(instance, &model->mgr->instances, link)
    if (instance->model == model)
        mgr_instance_stop(instance, reason);
}

/* To COLD or FAILED, at once or, when instances have attached early, when they have gone. */
static void leave_loading(struct mgr_model *model, bool failed, const char *reason)
{
    end_early(model, true);
    model->leaving_failed = failed;
    mgr_model_set_state(model, MODEL_LEAVING);
    stop_instances(model, reason);
    mgr_model_check_left(model);
}

static void load_failed(struct mgr_model *model, const struct error *why)
{
    struct error text = *why;

    model->wanted = false;
    model->phase = "";
    if (model->load_late) {
        model->load_late = false;
        leave_loading(model, false, "the model is being unloaded");
        return;
    }
    error_prefix(&text, "model %s", model->name);
    if (model->mgr->draining)
        log_info("load broken off", "model=%s path=%s", model->name, model->path);
    else
        log_warn("load failed", "model=%s path=%s error=\"%s\"", model->name, model->path,
                 text.text);
    model->error = text;
    model->mgr->counters.load_failures++;
    leave_loading(model, true, why->text);
    mgr_spawn_fail(model, model->n_waiting, &text);
    mgr_watch_loaded(model, &text);
}

static void arm_watchdog(struct mgr_model *model)
{
    child_deadline(model->loader, model->mgr->options.load_timeout_no_progress, "progress");
}

static bool phase_is(const struct mgr_model *model, const char *phase)
{
    return model->state == MODEL_LOADING && !strcmp(model->phase, phase);
}

int mgr_model_kv_check(const struct mgr_model *model, uint64_t kv_bytes, struct error *err)
{
    /* What an earlier load took says nothing of the next one, which may be of another form. */
    bool known =
        model->state == MODEL_PARKED || phase_is(model, "admitting") || phase_is(model, "reading");
    uint64_t page = known ? model->kv_page_bytes[mgr_model_kv_kind(model)] : 0;
    uint64_t budget = mgr_budget(model->mgr);
    uint64_t weights = known ? MIN(model->weights_bytes, budget) : 0;

    if (kv_bytes > budget - weights)
        return error_set(err, EDQUOT,
                         "kv_bytes is %.1f MiB; the budget is %.1f MiB, of which the weights take "
                         "%.1f MiB: ask for less, or raise memory_limit",
                         (double)kv_bytes / (double)MIB, (double)budget / (double)MIB,
                         (double)weights / (double)MIB);
    if (!kv_bytes || kv_bytes >= page)
        return 0;
    return error_set(err, EINVAL,
                     "kv_bytes is %llu; one page of %d tokens of this model takes %llu, give at "
                     "least that, or 0 for a good size",
                     (unsigned long long)kv_bytes, KV_PAGE_SIZE, (unsigned long long)page);
}

static void on_planned(struct mgr_model *model, const Ember__V1__LoaderPlanned *planned)
{
    snprintf(model->architecture, sizeof model->architecture, "%s", planned->architecture);
    utf8_tame_line(model->architecture);
    model->weights_bytes = planned->weights_bytes;
    model->parameters = planned->parameters;
    model->vocab_size = planned->vocab_size;
    model->max_positions = planned->max_positions;
    for (size_t i = 0; i < KV_KIND_COUNT; i++)
        model->kv_page_bytes[i] = i < planned->n_kv_page_bytes ? planned->kv_page_bytes[i] : 0;
    child_deadline(model->loader, 0, NULL); /* the next move is ours */
    model->phase = "admitting";
    struct error err = {0};
    if (mgr_model_kv_check(model, model->kv_asked, &err) < 0) {
        model->kv_asked = 0; /* or every later load would fail for it */
        mgr_model_load_refuse(model, &err);
        return;
    }
    mgr_watch_progress(model, true);
    mgr_settle_soon(model->mgr);
}

void mgr_model_load_admit(struct mgr_model *model)
{
    Ember__V1__LoaderAdmitted admitted = EMBER__V1__LOADER_ADMITTED__INIT;
    Ember__V1__ToLoader message = EMBER__V1__TO_LOADER__INIT;

    model->charged = model->weights_bytes;
    model->admitted_ns = clock_ns();
    model->phase = "reading";
    message.kind_case = EMBER__V1__TO_LOADER__KIND_ADMITTED;
    message.admitted = &admitted;
    arm_watchdog(model);
    child_send(model->loader, &message.base, NULL, 0);
    mgr_watch_progress(model, true);
}

void mgr_model_load_refuse(struct mgr_model *model, const struct error *why)
{
    model->phase = "ending";
    child_last_words(model->loader, -why->code, "%s", why->text);
    child_kill(model->loader);
}

static void on_progress(struct mgr_model *model, uint64_t bytes_done)
{
    if (bytes_done <= model->bytes_done)
        return;
    model->bytes_done = MIN(bytes_done, model->weights_bytes);
    arm_watchdog(model);
    mgr_watch_progress(model, false);
    if (model->n_waiting) /* it may be near enough to its end now */
        mgr_settle_soon(model->mgr);
}

/* The memory is there: instances that somebody waits for may come up while it is being filled. */
static void on_attachable(struct mgr_model *model, int *fds)
{
    struct error err = {0};

    if (filling_attach(fds[2], &model->early, &err) < 0) {
        log_warn("instances wait for the whole load", "model=%s error=\"%s\"", model->name,
                 err.text);
        return;
    }
    for (size_t i = 0; i < ARRAY_LEN(model->early_fds); i++)
        model->early_fds[i] = TAKE_FD(fds[i]);
    for (struct mgr_spawn *s = TAILQ_FIRST(&model->waiting); s; s = TAILQ_NEXT(s, link))
        s->parked_ns = clock_ns();
    mgr_settle_soon(model->mgr);
}

static void on_done(struct mgr_model *model, const Ember__V1__LoaderDone *done, int *fds)
{
    struct mgr *mgr = model->mgr;

    end_early(model, false);
    snprintf(model->digest, sizeof model->digest, "%s", done->digest);
    model->from_pack = done->from_pack;
    snprintf(model->recipe, sizeof model->recipe, "%s", done->recipe);
    mgr_pack_loaded(model, done);
    model->weights_fd = TAKE_FD(fds[0]);
    model->manifest_fd = TAKE_FD(fds[1]);
    model->load_ns = clock_ns() - model->load_started_ns;
    model->bytes_done = model->weights_bytes;
    model->wanted = false;
    model->error = (struct error){0};
    model->failures = 0;
    model->phase = "";
    child_deadline(model->loader, LOADER_EXIT_NS, "exit of the loader");
    mgr->counters.loads++;
    for (struct mgr_spawn *s = TAILQ_FIRST(&model->waiting); s; s = TAILQ_NEXT(s, link))
        s->parked_ns = s->parked_ns ? s->parked_ns : clock_ns();
    mgr_model_set_state(model, MODEL_PARKED);
    log_info("model resident", "model=%s bytes=%llu ms=%.1f digest=%s", model->name,
             (unsigned long long)model->weights_bytes, (double)model->load_ns / 1e6, model->digest);
    mgr_fdstore_put(model); /* who watches the load hears of its end when the loader has gone */
}

/* The model is served all the same: its users may want no text. */
static void on_text(struct mgr_model *model, const char *notice)
{
    if (model->state != MODEL_PARKED) /* unloaded meanwhile */
        return;
    snprintf(model->notice, sizeof model->notice, "%s", notice);
    utf8_tame_line(model->notice);
    log_warn("model is incomplete", "model=%s path=%s error=\"%s\"", model->name, model->path,
             model->notice);
    mgr_fdstore_put(model);
}

static void loader_message(void *owner, const uint8_t *data, size_t len, int *fds, size_t n_fds)
{
    struct mgr_model *model = owner;
    Ember__V1__FromLoader *m = ember__v1__from_loader__unpack(NULL, len, data);
    bool understood = true;

    if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_FAILED)
        child_last_words(model->loader, m->failed->error, "%s", m->failed->text);
    else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_PLANNED &&
             phase_is(model, "planning"))
        on_planned(model, m->planned);
    else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_PROGRESS &&
             phase_is(model, "reading"))
        on_progress(model, m->progress->bytes_done);
    else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_ATTACHABLE &&
             phase_is(model, "reading") && n_fds == 3 && !model->early)
        on_attachable(model, fds);
    else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_DONE && phase_is(model, "reading") &&
             n_fds == 2)
        on_done(model, m->done, fds);
    else if (m && m->kind_case == EMBER__V1__FROM_LOADER__KIND_TEXT &&
             model->state != MODEL_LOADING)
        on_text(model, m->text->notice);
    else if (!phase_is(model, "ending"))
        understood = false;
    if (!understood) {
        child_last_words(model->loader, EPROTO, "the loader sent what it may not send while %s",
                         model->phase);
        child_kill(model->loader);
    }
    ember__v1__from_loader__free_unpacked(m, NULL);
}

/* It has crashed, or taken too long, over what may be broken. */
static void text_unknown(struct mgr_model *model, const struct error *why)
{
    char notice[ERROR_TEXT_MAX];

    snprintf(notice, sizeof notice, "tokenizer and chat template have not been looked at: %s",
             why->text);
    on_text(model, notice);
}

static void loader_exited(void *owner, const struct error *why)
{
    struct mgr_model *model = owner;

    model->loader = NULL;
    if (model->state == MODEL_LOADING) {
        load_failed(model, why);
    } else if (model->state == MODEL_PARKED) {
        if (why->code != -EPIPE && !*model->notice && !model->mgr->draining)
            text_unknown(model, why);
        mgr_watch_loaded(model, NULL);
    }
    mgr_settle_soon(model->mgr);
    if (model->forgotten)
        mgr_model_forget(model);
}

void mgr_model_load_start(struct mgr_model *model)
{
    static const struct child_handlers handlers = {5, loader_message, loader_exited};
    Ember__V1__LoaderStart start = EMBER__V1__LOADER_START__INIT;
    Ember__V1__ToLoader message = EMBER__V1__TO_LOADER__INIT;
    struct error err = {0};

    if (child_start(model->mgr->base, "ember-loader", model->name, &handlers, model, &model->loader,
                    &err) < 0) {
        error_prefix(&err, "model %s", model->name);
        model->error = err;
        model->wanted = false;
        model->mgr->counters.load_failures++;
        log_warn("load failed", "model=%s error=\"%s\"", model->name, err.text);
        mgr_spawn_fail(model, model->n_waiting, &err);
        mgr_watch_loaded(model, &err);
        return;
    }
    log_info("loading", "model=%s path=%s pid=%d", model->name, model->path,
             (int)child_pid(model->loader));
    model->forgotten = false;
    model->phase = "planning";
    *model->notice = 0;
    model->load_started_ns = clock_ns();
    model->bytes_done = 0;
    mgr_model_set_state(model, MODEL_LOADING);
    start.path = model->path;
    start.quant = model->quant;
    start.threads = (uint32_t)model->mgr->options.threads;
    start.rate = model->mgr->options.load_rate;
    start.packs_dir = (char *)(mgr_packs_dir(model->mgr) ? mgr_packs_dir(model->mgr) : "");
    start.early = model->mgr->options.early_start != EMBERD_EARLY_NEVER;
    message.kind_case = EMBER__V1__TO_LOADER__KIND_START;
    message.start = &start;
    arm_watchdog(model);
    child_send(model->loader, &message.base, NULL, 0);
    mgr_watch_progress(model, true);
}

/* ---- residency ---- */

void mgr_model_adopt(struct mgr_model *model, int weights_fd, int manifest_fd)
{
    model->weights_fd = weights_fd;
    model->manifest_fd = manifest_fd;
    model->charged = model->weights_bytes;
    mgr_model_set_state(model, MODEL_PARKED);
    log_info("model taken up again", "model=%s bytes=%llu digest=%s", model->name,
             (unsigned long long)model->weights_bytes, model->digest);
}

void mgr_model_check_left(struct mgr_model *model)
{
    if (model->state != MODEL_LEAVING)
        return;
    for (int i = 0; i < INSTANCE_GONE; i++)
        if (model->instances[i])
            return;
    if (model->packer) /* it holds the memory, too */
        return;
    model->charged = 0;
    mgr_model_set_state(model, model->leaving_failed ? MODEL_FAILED : MODEL_COLD);
    model->leaving_failed = false;
    mgr_watch_unloaded(model);
}

void mgr_model_unload(struct mgr_model *model, const struct error *why)
{
    model->wanted = false;
    mgr_spawn_fail(model, model->n_waiting, why);
    mgr_watch_loaded(model, why);
    if (model->state == MODEL_LOADING) {
        model->load_late = true;
        model->phase = "ending";
        child_kill(model->loader);
    } else if (model->state == MODEL_PARKED) {
        log_info("model given up", "model=%s bytes=%llu reason=\"%s\"", model->name,
                 (unsigned long long)model->weights_bytes, why->text);
        mgr_fdstore_remove(model);
        mgr_pack_stop(model);
        if (model->loader)
            child_kill(model->loader);
        model->weights_fd = fd_close(model->weights_fd);
        model->manifest_fd = fd_close(model->manifest_fd);
        model->leaving_failed = false;
        mgr_model_set_state(model, MODEL_LEAVING);
        stop_instances(model, why->text);
        mgr_model_check_left(model);
    } else if (model->state == MODEL_COLD || model->state == MODEL_FAILED) {
        mgr_watch_unloaded(model);
    }
}
