/* SPDX-License-Identifier: Apache-2.0 */
/* The page of /metrics. A line is its name, the model's labels and a number, copied together. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/clock.h"
#include "daemon/gateway/fleet.h"

struct page {
    struct gw *gw;
    struct buffer *out;
};

/* ---- pieces ---- */

static void put(struct page *p, const char *text, size_t len)
{
    if (buffer_append(p->out, text, len) < 0)
        abort();
}

static void puts_to(struct page *p, const char *text)
{
    put(p, text, strlen(text));
}

static void put_integer(struct page *p, uint64_t v)
{
    char text[20], *at = text + sizeof text;

    do
        *--at = (char)('0' + v % 10);
    while (v /= 10);
    put(p, at, (size_t)(text + sizeof text - at));
}

/* Nearly all are whole numbers. */
static void put_number(struct page *p, double v)
{
    char text[40];

    if (v >= 0 && v < 9007199254740992.0 && v == (double)(uint64_t)v) {
        put_integer(p, (uint64_t)v);
        return;
    }
    int n = snprintf(text, sizeof text, "%.15g", v);
    put(p, text, (size_t)n);
}

static void head(struct page *p, const char *name, const char *type, const char *help)
{
    puts_to(p, "# HELP ");
    puts_to(p, name);
    puts_to(p, " ");
    puts_to(p, help);
    puts_to(p, ".\n# TYPE ");
    puts_to(p, name);
    puts_to(p, " ");
    puts_to(p, type);
    puts_to(p, "\n");
}

/* A label's value with what the format wants escaped. */
static void escaped(struct buffer *out, const char *text)
{
    for (; *text; text++) {
        if ((*text == '"' || *text == '\\') && buffer_append(out, "\\", 1) < 0)
            abort();
        if (buffer_append(out, *text == '\n' ? " " : text, 1) < 0)
            abort();
    }
}

char *metrics_labels(const char *model)
{
    struct buffer name = {0};

    escaped(&name, model);
    char *labels =
        x_printf("model_name=\"%.*s\",engine=\"0\"", (int)name.len, name.data ? name.data : "");
    buffer_free(&name);
    return labels;
}

/* NAME{LABELS MORE} VALUE; labels may be empty, more begins with a comma then. */
static void line(struct page *p, const char *name, const char *labels, const char *more, double v)
{
    puts_to(p, name);
    puts_to(p, "{");
    puts_to(p, labels);
    puts_to(p, more);
    puts_to(p, "} ");
    put_number(p, v);
    puts_to(p, "\n");
}

static void plain(struct page *p, const char *name, const char *type, const char *help, double v)
{
    head(p, name, type, help);
    puts_to(p, name);
    puts_to(p, " ");
    put_number(p, v);
    puts_to(p, "\n");
}

/* `most`: no value is larger, so buckets beyond would say nothing. */
static void histogram(struct page *p, const char *name, const char *labels, const char *more,
                      const struct bounds *b, double most, const struct histogram *h)
{
    char start[512];
    uint64_t total = 0;
    unsigned i;

    int len = snprintf(start, sizeof start, "%s_bucket{%s%s,le=\"", name, labels, more);
    if (len < 0 || (size_t)len >= sizeof start)
        return; /* a name of more than 300 bytes */
    for (i = 0; i < b->n && b->at[i] <= most; i++) {
        total += h->counts[i];
        put(p, start, (size_t)len);
        puts_to(p, b->text[i]);
        puts_to(p, "\"} ");
        put_integer(p, total);
        puts_to(p, "\n");
    }
    for (; i <= b->n; i++)
        total += h->counts[i];
    put(p, start, (size_t)len);
    puts_to(p, "+Inf\"} ");
    put_integer(p, total);
    puts_to(p, "\n");
    puts_to(p, name);
    line(p, "_sum", labels, more, h->sum);
    puts_to(p, name);
    line(p, "_count", labels, more, (double)total);
}

static bool any(const struct histogram *h)
{
    for (int i = 0; i < HISTOGRAM_MAX; i++)
        if (h->counts[i])
            return true;
    return false;
}

/* ---- of models ---- */

#define EACH_SHOWN(p, model)                                                                       \
    TAILQ_FOREACH(model, &(p)->gw->models, link)                                                   \
    if (model->listed || model->sched)

/* X(name, type, help, value of `s`, the scheduler's figures, `m` and `model`) */
#define MODEL_VALUES(X)                                                                            \
    X("vllm:num_requests_running", "gauge", "Sequences that run", s->running)                      \
    X("vllm:num_requests_waiting", "gauge", "Sequences that wait", s->waiting)                     \
    X("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1",                     \
      s->pages ? (double)s->pages_used / (double)s->pages : 0)                                     \
    X("vllm:gpu_cache_usage_perc", "gauge", "The same under its older name",                       \
      s->pages ? (double)s->pages_used / (double)s->pages : 0)                                     \
    X("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up", s->queried_tokens)  \
    X("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found", s->cached_tokens)          \
    X("vllm:gpu_prefix_cache_queries_total", "counter", "The same under its older name",           \
      s->queried_tokens)                                                                           \
    X("vllm:gpu_prefix_cache_hits_total", "counter", "The same under its older name",              \
      s->cached_tokens)                                                                            \
    X("vllm:prompt_tokens_total", "counter", "Prompt tokens of requests", m->prompt_tokens)        \
    X("vllm:prompt_tokens_cached_total", "counter", "Prompt tokens that were cached",              \
      m->cached_tokens)                                                                            \
    X("vllm:generation_tokens_total", "counter", "Tokens generated", m->generated_tokens)          \
    X("vllm:num_preemptions_total", "counter", "Sequences taken off to make room", s->preemptions) \
    X("ember_requests_refused_total", "counter", "Requests refused with 429", s->refused)          \
    X("ember_failovers_total", "counter", "Instances that were replaced", m->failovers)            \
    X("ember_replays_total", "counter", "Sequences replayed on another instance", s->replays)      \
    X("ember_wasted_tokens_total", "counter", "Tokens sampled for nobody", s->wasted_tokens)       \
    X("ember_steps_total", "counter", "Steps planned", s->steps)                                   \
    X("ember_spawn_failures_total", "counter", "Spawns that failed", m->spawn_failures)            \
    X("ember_taken_up_total", "counter", "Leases of an earlier gateway taken up", m->taken_up)     \
    X("ember_backlog_tokens", "gauge", "Prompt tokens that wait", s->backlog_tokens)               \
    X("ember_oldest_wait_seconds", "gauge", "Waiting time of the oldest sequence",                 \
      (double)s->oldest_wait_ns / 1e9)                                                             \
    X("ember_tokens_per_second", "gauge", "Measured speed of one instance", s->tokens_per_s)

static void values(struct page *p)
{
    struct gw_model *model;
    uint64_t now = clock_ns();

    EACH_SHOWN(p, model)
    if (model->sched) /* none before the first request: zeros */
        sched_model_stats(model->sched, now, &model->stats);
#define X(name, type, help, expression)                                                            \
    head(p, name, type, help);                                                                     \
    EACH_SHOWN(p, model)                                                                           \
    {                                                                                              \
        const struct model_metrics *m = &model->metrics;                                           \
        const struct sched_stats *s = &model->stats;                                               \
        (void)m, (void)s;                                                                          \
        line(p, name, model->labels, "", (double)(expression));                                    \
    }
    MODEL_VALUES(X)
#undef X
}

static double most_of(const struct gw_model *model, enum metrics_bounds bounds)
{
    return bounds == BOUNDS_length && model->max_positions ? model->max_positions : 1e300;
}

static void histograms(struct page *p)
{
    const struct gw_model *model;

#define X(member, name, bounds, help)                                                              \
    head(p, name, "histogram", help);                                                              \
    EACH_SHOWN(p, model)                                                                           \
    histogram(p, name, model->labels, "", &metrics_bounds[BOUNDS_##bounds],                        \
              most_of(model, BOUNDS_##bounds), &model->metrics.member);
    MODEL_HISTOGRAMS(X)
#undef X
}

/* Spawns by warmth and by phase; those that never happened are left out. */
static void spawns(struct page *p)
{
    static const char *const from[] = {
#define X(name) ",from=\"" #name "\"",
        SPAWN_WARMTHS(X)
#undef X
    };
    static const char *const phase[] = {
#define X(name) ",phase=\"" #name "\"",
        SPAWN_PHASES(X)
#undef X
    };
    const struct bounds *bounds = &metrics_bounds[BOUNDS_spawn];
    const struct gw_model *model;

    head(p, "ember_spawn_seconds", "histogram", "Time of spawns by the warmth they came from");
    TAILQ_FOREACH(model, &p->gw->models, link)
    for (size_t i = 0; i < ARRAY_LEN(from); i++)
        if (any(&model->metrics.spawn[i]))
            histogram(p, "ember_spawn_seconds", model->labels, from[i], bounds, 1e300,
                      &model->metrics.spawn[i]);
    head(p, "ember_spawn_phase_seconds", "histogram", "Phases of spawns");
    TAILQ_FOREACH(model, &p->gw->models, link)
    for (size_t i = 0; i < ARRAY_LEN(phase); i++)
        if (any(&model->metrics.phase[i]))
            histogram(p, "ember_spawn_phase_seconds", model->labels, phase[i], bounds, 1e300,
                      &model->metrics.phase[i]);
}

/* Constant ones, whose labels are what is said. */
static void infos(struct page *p)
{
    const struct gw_model *model;
    char more[160];

    head(p, "vllm:cache_config_info", "gauge", "The KV cache's shape");
    EACH_SHOWN(p, model)
    {
        snprintf(more, sizeof more,
                 ",block_size=\"16\",num_gpu_blocks=\"%" PRIu64 "\",cache_dtype=\"auto\","
                 "enable_prefix_caching=\"%s\"",
                 model->stats.pages, p->gw->options.prefix_cache ? "True" : "False");
        line(p, "vllm:cache_config_info", model->labels, more, 1);
    }
    head(p, "vllm:lora_requests_info", "gauge", "Adapters in use: none are supported");
    line(p, "vllm:lora_requests_info",
         "max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"", "", 0);
}

static void by_state(struct page *p)
{
    static const char *const reasons[] = {
#define X(name) ",finished_reason=\"" #name "\"",
        FINISH_REASONS(X)
#undef X
    };
    const struct gw_model *model;

    head(p, "vllm:request_success_total", "counter", "Choices by the reason of their end");
    EACH_SHOWN(p, model)
    for (size_t i = 0; i < ARRAY_LEN(reasons); i++)
        line(p, "vllm:request_success_total", model->labels, reasons[i],
             (double)model->metrics.finished[i]);
    head(p, "vllm:prompt_tokens_by_source_total", "counter",
         "Prompt tokens by where they came from");
    EACH_SHOWN(p, model)
    {
        const struct model_metrics *m = &model->metrics;
        line(p, "vllm:prompt_tokens_by_source_total", model->labels, ",source=\"local_compute\"",
             m->computed.sum);
        line(p, "vllm:prompt_tokens_by_source_total", model->labels, ",source=\"local_cache_hit\"",
             (double)m->cached_tokens);
        line(p, "vllm:prompt_tokens_by_source_total", model->labels,
             ",source=\"external_kv_transfer\"", 0);
    }
    head(p, "vllm:engine_sleep_state", "gauge", "1 for the state that /sleep and /wake_up chose");
    EACH_SHOWN(p, model)
    {
        line(p, "vllm:engine_sleep_state", model->labels, ",sleep_state=\"awake\"", !model->asleep);
        line(p, "vllm:engine_sleep_state", model->labels, ",sleep_state=\"weights_offloaded\"",
             model->asleep);
    }
    head(p, "ember_instances", "gauge", "Instances by warmth; starting ones are loading");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        line(p, "ember_instances", model->labels, ",warmth=\"loading\"", model->emberd_starting);
        line(p, "ember_instances", model->labels, ",warmth=\"warm\"", model->standby);
        line(p, "ember_instances", model->labels, ",warmth=\"hot\"", model->leased);
    }
    head(p, "ember_model_warmth", "gauge", "1 cold, 2 loading, 3 parked, 4 warm, 5 hot, 6 failed");
    TAILQ_FOREACH(model, &p->gw->models, link)
    line(p, "ember_model_warmth", model->labels, "", model->warmth);
    head(p, "ember_model_weights_bytes", "gauge", "Bytes of resident weights");
    TAILQ_FOREACH(model, &p->gw->models, link)
    line(p, "ember_model_weights_bytes", model->labels, "",
         model->warmth >= 3 && model->warmth <= 5 ? (double)model->weights_bytes : 0);
}

/* ---- of emberd: as it said last ---- */

static void cache_counts(struct page *p, const Ember__V1__GetStatusResponse *s, bool hits)
{
    const char *name = hits ? "ember_cache_hits_total" : "ember_cache_misses_total";
    struct buffer labels = {0};

    head(p, name, "counter",
         hits ? "Kernels and graphs that instances found in the cache"
              : "Those that they did not, by the factor that differed");
    for (size_t i = 0; i < s->n_cache; i++) {
        if (!*s->cache[i]->cause != hits)
            continue;
        labels.len = 0;
        buffer_printf(&labels, "kind=\"");
        escaped(&labels, s->cache[i]->kind);
        if (!hits) {
            buffer_printf(&labels, "\",cause=\"");
            escaped(&labels, s->cache[i]->cause);
        }
        buffer_printf(&labels, "\"");
        line(p, name, labels.data, "", (double)s->cache[i]->count);
    }
    buffer_free(&labels);
}

/* X(name, type, help, member of GetStatusResponse) */
#define EMBERD_VALUES(X)                                                                           \
    X("ember_memory_budget_bytes", "gauge", "What emberd may use", memory_budget)                  \
    X("ember_emberd_resident_memory_bytes", "gauge", "emberd itself", own_rss)                     \
    X("ember_loads_total", "counter", "Loads that succeeded", loads)                               \
    X("ember_load_failures_total", "counter", "Loads that failed", load_failures)                  \
    X("ember_evictions_total", "counter", "Models that made room", evictions)                      \
    X("ember_instances_lost_total", "counter", "Instances that died", instances_lost)              \
    X("ember_spawns_total", "counter", "Spawns, whoever asked", spawns)                            \
    X("ember_spawns_from_pool_total", "counter", "Those that a standby served", spawns_from_pool)

static void emberd(struct page *p)
{
    const Ember__V1__GetStatusResponse *s = fleet_status(p->gw);

    plain(p, "ember_emberd_up", "gauge", "1: emberd answers", fleet_connected(p->gw));
    if (!s)
        return;
#define X(name, type, help, member) plain(p, name, type, help, (double)s->member);
    EMBERD_VALUES(X)
#undef X
    head(p, "ember_resident_bytes", "gauge", "Bytes by tier; reserved: admitted, not there yet");
    line(p, "ember_resident_bytes", "tier=\"weights\"", "", (double)s->memory_weights);
    line(p, "ember_resident_bytes", "tier=\"instances\"", "", (double)s->memory_instances);
    line(p, "ember_resident_bytes", "tier=\"reserved\"", "", (double)s->memory_reserved);
    cache_counts(p, s, true);
    cache_counts(p, s, false);
    if (s->gateway && *s->gateway->state && strcmp(s->gateway->state, "off"))
        plain(p, "ember_gateway_restarts_total", "counter", "Starts of the gateway after the first",
              s->gateway->restarts);
}

/* What Prometheus' client libraries say of every process. */
static void process(struct page *p)
{
    struct rusage usage;

    plain(p, "process_resident_memory_bytes", "gauge", "Resident memory of the gateway",
          (double)mem_resident());
    plain(p, "process_start_time_seconds", "gauge", "When the gateway started, since 1970",
          (double)p->gw->started);
    if (getrusage(RUSAGE_SELF, &usage) == 0)
        plain(p, "process_cpu_seconds_total", "counter", "CPU time of the gateway",
              (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                  (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6);
}

void metrics_print(struct gw *gw, struct buffer *out)
{
    struct page p = {gw, out};

    values(&p);
    histograms(&p);
    by_state(&p);
    infos(&p);
    spawns(&p);
    emberd(&p);
    plain(&p, "ember_gateway_requests", "gauge", "Requests that have not ended", gw->n_jobs);
    process(&p);
}
