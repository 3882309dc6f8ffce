/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of a request. Three may hold a job: its client (job->http), a worker (with_worker) and
 * the scheduler (n_live parts). It is freed when none does.
 */
#include "daemon/gateway/request.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "base/clock.h"
#include "base/digest.h"
#include "base/log.h"
#include "daemon/gateway/conn.h"

/* ---- coming and going ---- */

static void part_free(struct gw_part *part)
{
    struct buffer *all[] = {&part->prompt_lp, &part->echo_tokens, &part->echo_lp, &part->echo_top,
                            &part->echo_offsets};

    for (size_t i = 0; i < ARRAY_LEN(all); i++)
        buffer_free(all[i]);
}

static void leave_model(struct gw_job *job)
{
    if (job->state == JOB_READING)
        TAILQ_REMOVE(&job->model->waiting, job, waiting);
    job->state = JOB_PARSING;
}

void job_settle(struct gw_job *job)
{
    if (job->http || job->with_worker || job->n_live || job->held)
        return;
    if (job->state == JOB_READING)
        leave_model(job);
    for (uint32_t i = 0; i < job->n_choices; i++)
        choice_free(&job->choices[i]);
    for (size_t i = 0; job->parts && i < job->api.n_prompts; i++)
        part_free(&job->parts[i]);
    TAILQ_REMOVE(&job->gw->jobs, job, link);
    job->gw->n_jobs--;
    free(job->choices);
    free(job->parts);
    free(job->suppress);
    compiled_unref(job->grammar);
    free(job->body);
    buffer_free(&job->head);
    buffer_free(&job->out);
    api_request_free(&job->api);
    free(job);
}

void job_cancel(struct gw_job *job)
{
    uint64_t now = clock_ns();

    gw_pump(job->gw);
    job->held++;
    for (size_t i = 0; job->n_live && i < job->api.n_prompts; i++)
        if (job->parts[i].id)
            sched_cancel(job->gw->sched, job->parts[i].id, now);
    job->held--;
    job_settle(job);
}

static void on_gone(void *user)
{
    struct gw_job *job = user;

    log_debug("client gone", "request=%s", job->id);
    job->http = NULL;
    atomic_store(&job->gone, true);
    if (job->n_live)
        job_cancel(job); /* the last part's end frees it */
    else
        job_settle(job);
}

void job_abort(struct gw_job *job)
{
    if (!job->http)
        return;
    log_warn("stream cut: its reader is too slow", "request=%s", job->id);
    http_abort(TAKE(job->http));
    job_cancel(job);
}

void job_fail(struct gw_job *job, int status, const char *code, const char *param, unsigned retry_s,
              const char *text)
{
    if (job->fail.status)
        return;
    job->fail.status = status;
    job->fail.code = code;
    job->retry_s = retry_s;
    snprintf(job->fail.param, sizeof job->fail.param, "%s", param ? param : "");
    error_set(&job->fail.err, EINVAL, "%s", text);
}

/* Answers a job that the scheduler has no part of. */
static void end_now(struct gw_job *job)
{
    if (job->state == JOB_READING)
        leave_model(job);
    respond_end(job);
    job_settle(job);
}

/* ---- to the scheduler ---- */

static int make_choices(struct gw_job *job)
{
    size_t parts = job->api.n_prompts, n = parts * job->api.n;

    job->parts = mem_alloc(parts, sizeof *job->parts);
    job->choices = mem_alloc(n, sizeof *job->choices);
    if (!job->parts || !job->choices)
        return -ENOMEM;
    for (size_t i = 0; i < parts; i++)
        job->parts[i] = (struct gw_part){.job = job, .index = (uint32_t)i};
    for (size_t i = 0; i < n; i++) {
        struct gw_part *part = &job->parts[i / job->api.n];
        if (choice_init(&job->choices[i], part, (uint32_t)i) < 0)
            return -ENOMEM;
        job->n_choices++;
    }
    job->stops = (struct stop_set){job->api.stops, job->api.stop_lens, job->api.n_stops};
    return 0;
}

/* min_tokens: what must not be sampled before. A grammar: where it may end, what says so. */
static int list_stop_tokens(struct gw_job *job)
{
    const struct text *text = job->model->text;

    if (!job->api.min_tokens && !job->grammar)
        return 0;
    job->suppress = mem_alloc(text->n_eos + job->api.n_stop_ids + 1, sizeof *job->suppress);
    if (!job->suppress)
        return -ENOMEM;
    for (uint32_t i = 0; i < text->n_eos; i++)
        job->suppress[job->n_suppress++] = text->eos[i];
    for (size_t i = 0; i < job->api.n_stop_ids; i++)
        job->suppress[job->n_suppress++] = job->api.stop_ids[i];
    return 0;
}

static int submit_part(struct gw_job *job, struct gw_part *part, uint32_t *ret_retry_s,
                       struct error *err)
{
    const struct api_request *api = &job->api;
    const struct api_prompt *prompt = &api->prompts[part->index];
    uint64_t now = clock_ns();
    _cleanup_free_ char *salt =
        x_printf("%u %s", job->model->cache_epoch, api->cache_salt ? api->cache_salt : "");
    struct sched_request request = {
        .model = job->model->sched,
        .client = http_client(job->http),
        .priority = api->priority,
        .prompt = prompt->ids,
        .n_prompt = (uint32_t)prompt->n_ids,
        .min_tokens = api->min_tokens,
        .max_tokens = api->max_tokens,
        .n = api->n,
        .stop_ids = api->stop_ids,
        .n_stop_ids = (uint32_t)api->n_stop_ids,
        .ignore_eos = api->ignore_eos,
        .prompt_logprobs = api->prompt_logprobs >= 0 || (api->echo && api->logprobs >= 0),
        .cache_salt = salt,
        .cache_salt_len = strlen(salt),
        .sampling = &api->sampling,
        .deadline = http_received_ns(job->http) + job->gw->options.queue_timeout,
        .user = part,
    };

    if (api->user) /* those who share a key or an address */
        request.client ^= checksum_of(api->user, strlen(api->user));
    return sched_submit(job->gw->sched, &request, now, &part->id, ret_retry_s, err);
}

const char *job_prompt_field(const struct gw_job *job)
{
    return job->kind == API_CHAT ? "messages" : "prompt";
}

static void refuse(struct gw_job *job, int r, uint32_t retry_s, const struct error *err)
{
    if (r == SCHED_FULL)
        job_fail(job, 429, "queue_full", NULL, retry_s ? retry_s : 1,
                 "The queue is full; try again later.");
    else if (r == -E2BIG)
        job_fail(job, 400, "context_length_exceeded", job_prompt_field(job), 0, error_text(err));
    else
        job_fail(job, r == -ENOMEM ? 503 : 400, NULL, NULL, 0, error_text(err));
}

static void submit(struct gw_job *job)
{
    struct error err = {0};
    uint32_t retry_s = 0;
    int r = make_choices(job);

    if (r == 0)
        r = list_stop_tokens(job);
    job->state = JOB_RUNNING;
    respond_init(job);
    if (r < 0)
        error_set(&err, ENOMEM, "no memory for the request");
    for (size_t i = 0; i < job->api.n_prompts && r == 0; i++) {
        r = submit_part(job, &job->parts[i], &retry_s, &err);
        if (r == 0)
            job->n_live++;
        else
            job->parts[i].id = 0;
    }
    job->gw->n_running += job->n_live;
    if (r != 0) {
        refuse(job, r, retry_s, &err);
        if (!job->n_live)
            end_now(job);
        else
            job_cancel(job);
        return;
    }
    gw_pump(job->gw);
}

/* ---- tokenizing, on a worker ---- */

/* truncate_prompt_tokens: the last ones stay, or the first; -1 leaves room for the answer. */
static void truncate_prompts(struct gw_job *job)
{
    struct api_request *api = &job->api;
    uint32_t most = job->model->max_positions;
    uint32_t answer = api->max_tokens == UINT32_MAX ? 1 : MAX(api->max_tokens, 1);
    size_t keep = api->truncate > 0 ? (size_t)api->truncate
                  : most > answer   ? most - answer
                                    : SIZE_MAX;

    for (size_t i = 0; api->truncate && i < api->n_prompts; i++) {
        struct api_prompt *p = &api->prompts[i];
        if (p->n_ids <= keep)
            continue;
        if (!api->truncate_right)
            memmove(p->ids, p->ids + (p->n_ids - keep), keep * sizeof *p->ids);
        p->n_ids = keep;
    }
}

/* Known before there is an instance: none is started and waited for in vain. */
static void check_length(struct gw_job *job)
{
    const struct api_request *api = &job->api;
    uint32_t most = job->model->max_positions;
    char text[160];

    for (size_t i = 0; most && i < api->n_prompts; i++) {
        if (api->prompts[i].n_ids + (api->max_tokens > 0) <= most)
            continue;
        snprintf(text, sizeof text,
                 "a prompt of %zu tokens%s does not fit: the maximum context length is %u tokens",
                 api->prompts[i].n_ids, api->max_tokens ? ", and one more," : "", most);
        job_fail(job, 400, "context_length_exceeded", job_prompt_field(job), 0, text);
    }
}

static void run_prepare(struct work *work)
{
    struct gw_job *job = (struct gw_job *)((char *)work - offsetof(struct gw_job, work));

    if (atomic_load(&job->gone))
        return;
    if (text_prepare(job->model->text, &job->api, &job->fail) < 0 && !job->fail.status)
        job->fail.status = 400;
    truncate_prompts(job);
    if (job->kind != API_TOKENIZE && job->kind != API_DETOKENIZE)
        check_length(job);
    if (job->fail.status)
        return;
    if (job->kind == API_TOKENIZE || job->kind == API_DETOKENIZE)
        respond_tokens(job);
    if (job->api.grammar.kind == API_GRAMMAR_NONE)
        return;
    job->api.ignore_eos = false; /* a text that is over cannot go on */
    job->grammar = grammar_known(job->gw->grammars, &job->api);
}

static void run_compile(struct work *work)
{
    struct gw_job *job = (struct gw_job *)((char *)work - offsetof(struct gw_job, work));

    if (!atomic_load(&job->gone))
        grammar_of_request(job->gw->grammars, &job->api, &job->grammar, &job->fail);
}

static void prepared(struct work *work)
{
    struct gw_job *job = (struct gw_job *)((char *)work - offsetof(struct gw_job, work));

    job->with_worker = false;
    if (!job->http) {
        job_settle(job);
    } else if (job->model->replaced) { /* its tokens may mean nothing to the other */
        job_fail(job, 503, "model_unavailable", "model", 1, GW_REPLACED);
        end_now(job);
    } else if (job->fail.status) {
        end_now(job);
    } else if (job->kind == API_TOKENIZE || job->kind == API_DETOKENIZE) {
        http_reply(TAKE(job->http), 200, "application/json", job->out.data, job->out.len);
        job_settle(job);
    } else if (job->gw->draining) {
        job_fail(job, 503, "shutting_down", NULL, 1, "The server is shutting down.");
        end_now(job);
    } else if (job->api.grammar.kind != API_GRAMMAR_NONE && !job->grammar) {
        /* On threads of its own: what takes long keeps nobody else from being tokenized. */
        job->with_worker = true;
        job->work = (struct work){.run = run_compile, .done = prepared};
        work_submit(job->gw->compilers, &job->work);
    } else {
        submit(job);
    }
}

static void prepare(struct gw_job *job)
{
    job->state = JOB_PREPARING;
    job->with_worker = true;
    job->work = (struct work){.run = run_prepare, .done = prepared};
    work_submit(job->gw->work, &job->work);
}

void request_model_ready(struct gw_model *model, const struct error *err)
{
    struct gw_job *job;

    while ((job = TAILQ_FIRST(&model->waiting))) {
        leave_model(job);
        if (!err) {
            prepare(job);
            continue;
        }
        job_fail(job, err->code == -ENOTSUP ? 501 : 503, "model_unavailable", "model", 0,
                 error_text(err));
        end_now(job);
    }
}

/* ---- finding the model ---- */

static void no_such_model(struct gw_job *job)
{
    char text[256];

    if (job->api.model)
        snprintf(text, sizeof text, "The model `%.128s` does not exist.", job->api.model);
    else
        snprintf(text, sizeof text, "No model is being served.");
    job_fail(job, 404, "model_not_found", "model", 0, text);
    end_now(job);
}

/* False: not known (yet). */
static bool find_model(struct gw_job *job)
{
    job->model = fleet_find(job->gw, job->api.model);
    if (!job->model)
        return false;
    if (job->model->state == GW_MODEL_READY) {
        prepare(job);
        return true;
    }
    job->state = JOB_READING;
    TAILQ_INSERT_TAIL(&job->model->waiting, job, waiting);
    fleet_read_model(job->model);
    return true;
}

void request_models_listed(struct gw *gw, const char *error)
{
    struct gw_job *job, *next;

    for (job = TAILQ_FIRST(&gw->jobs); job; job = next) {
        next = TAILQ_NEXT(job, link);
        if (job->state != JOB_FINDING || find_model(job))
            continue;
        if (!error) {
            no_such_model(job);
            continue;
        }
        job_fail(job, 503, "emberd_unavailable", NULL, 1, error);
        end_now(job);
    }
}

/* ---- parsing, on a worker ---- */

static void run_parse(struct work *work)
{
    struct gw_job *job = (struct gw_job *)((char *)work - offsetof(struct gw_job, work));

    if (!atomic_load(&job->gone))
        api_parse(job->kind, job->body, job->body_len, &job->api, &job->fail);
    free(TAKE(job->body));
}

static void name_job(struct gw_job *job)
{
    snprintf(job->id, sizeof job->id, "%s-%s", job->kind == API_CHAT ? "chatcmpl" : "cmpl",
             http_id(job->http));
}

/* One warning for each field's name, whoever sends it how often. */
static void warn_unknown(const struct gw_job *job)
{
    static char seen[64][40];
    static size_t n_seen;

    for (size_t i = 0; i < job->api.n_unknown; i++) {
        bool known = n_seen == ARRAY_LEN(seen);
        for (size_t k = 0; k < n_seen && !known; k++)
            known = !strncmp(seen[k], job->api.unknown[i], sizeof seen[k] - 1);
        if (known)
            continue;
        snprintf(seen[n_seen++], sizeof seen[0], "%s", job->api.unknown[i]);
        log_warn("unknown field ignored", "field=\"%.39s\" request=%s", job->api.unknown[i],
                 job->id);
    }
}

static void choose_seed(struct gw_job *job)
{
    uint64_t *seed = &job->api.sampling.seed;

    if (!job->api.seeded && getrandom(seed, sizeof *seed, 0) != sizeof *seed)
        abort(); /* cannot happen for 8 bytes once the host has booted */
}

static void parsed(struct work *work)
{
    struct gw_job *job = (struct gw_job *)((char *)work - offsetof(struct gw_job, work));

    job->with_worker = false;
    if (!job->http) {
        job_settle(job);
        return;
    }
    if (job->fail.status) {
        end_now(job);
        return;
    }
    if (job->api.request_id)
        http_take_id(job->http, job->api.request_id);
    name_job(job);
    warn_unknown(job);
    choose_seed(job);
    if (!find_model(job)) {
        job->state = JOB_FINDING;
        fleet_list(job->gw);
    }
}

/* ---- what arrives ---- */

static const struct route {
    const char *path;
    enum api_kind kind;
} routes[] = {{"/v1/completions", API_COMPLETION},
              {"/v1/chat/completions", API_CHAT},
              {"/tokenize", API_TOKENIZE},
              {"/detokenize", API_DETOKENIZE}};

static void begin(struct gw *gw, struct http_request *http, enum api_kind kind)
{
    struct gw_job *job = x_alloc(sizeof *job);

    *job = (struct gw_job){.gw = gw,
                           .http = http,
                           .kind = kind,
                           .created = (long)time(NULL),
                           .heartbeat_ns = http_received_ns(http),
                           .with_worker = true,
                           .work = {.run = run_parse, .done = parsed}};
    name_job(job);
    job->body = http_take_body(http, &job->body_len);
    TAILQ_INSERT_TAIL(&gw->jobs, job, link);
    gw->n_jobs++;
    http_on_gone(http, on_gone, job);
    if (!job->body) {
        job->with_worker = false;
        job_fail(job, 503, NULL, NULL, 1, "No memory for the request.");
        end_now(job);
        return;
    }
    work_submit(gw->work, &job->work);
}

void request_handle(void *ctx, struct http_request *http)
{
    struct gw *gw = ctx;
    const char *path = http_path(http);

    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        if (strcmp(path, routes[i].path))
            continue;
        if (strcmp(http_method(http), "POST"))
            http_not_allowed(http, "POST, OPTIONS");
        else if (gw->draining)
            http_fail(http, 503, NULL, "shutting_down", NULL, 1, "The server is shutting down.");
        else
            begin(gw, http, routes[i].kind);
        return;
    }
    if (!admin_handle(gw, http))
        http_fail(http, 404, NULL, NULL, NULL, 0, "Not Found");
}

/* ---- all at once ---- */

static bool has_begun(const struct gw_job *job)
{
    for (size_t i = 0; i < job->api.n_prompts; i++)
        if (job->parts[i].first_step_ns)
            return true;
    return false;
}

static void fail_jobs(struct gw_model *model, bool begun, uint64_t before_ns, int status,
                      unsigned retry_s, const char *text)
{
    struct gw_job *job, *next;

    for (job = TAILQ_FIRST(&model->gw->jobs); job; job = next) {
        next = TAILQ_NEXT(job, link);
        if (job->model != model || !job->n_live || !job->http ||
            http_received_ns(job->http) >= before_ns || (begun && !has_begun(job)))
            continue;
        job_fail(job, status, "model_unavailable", NULL, retry_s, text);
        job_cancel(job);
    }
}

void request_fail_all(struct gw_model *model, int status, unsigned retry_s, const char *text)
{
    fail_jobs(model, false, UINT64_MAX, status, retry_s, text);
}

void request_fail_begun(struct gw_model *model, uint64_t before_ns)
{
    fail_jobs(model, true, before_ns, 503, 1, "No instance of the model could be had in time.");
}

void request_heartbeats(struct gw *gw)
{
    struct gw_job *job, *next;
    uint64_t now = clock_ns();

    for (job = TAILQ_FIRST(&gw->jobs); job; job = next) {
        next = TAILQ_NEXT(job, link);
        /* n_live first: until then `api` may be with the worker that parses it. */
        if (job->http && job->n_live && job->api.stream && !job->any_token &&
            now - job->heartbeat_ns >= gw->options.heartbeat && !respond_heartbeat(job))
            job_abort(job);
    }
}
