/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/gateway/metrics.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "daemon/gateway/conn.h"
#include "daemon/gateway/gateway.h"
#include "daemon/gateway/json.h"

/* ---- histograms ---- */

static const struct bounds {
    unsigned n;
    double at[HISTOGRAM_MAX - 1];
} all_bounds[] = {
    [BOUNDS_latency] = {22, {0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
                             0.75,  1,      2.5,   5,    7.5,  10,   20,   40,   80,  160,  640}},
    [BOUNDS_token] = {18,
                      {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
                       0.5, 0.75, 1, 2.5, 5, 20}},
    [BOUNDS_length] = {17,
                       {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000,
                        100000, 1000000}},
    [BOUNDS_spawn] = {19,
                      {0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
                       10, 25, 50, 100, 250, 600}},
};

void metrics_observe(struct histogram *h, enum metrics_bounds which, double value)
{
    const struct bounds *b = &all_bounds[which];
    unsigned i = 0;

    while (i < b->n && value > b->at[i])
        i++;
    h->counts[i]++;
    h->sum += value;
}

static const char *const warmth_names[] = {
#define X(name) #name,
    SPAWN_WARMTHS(X)
#undef X
};
static const char *const phase_names[] = {
#define X(name) #name,
    SPAWN_PHASES(X)
#undef X
};
static const char *const reason_names[] = {
#define X(name) #name,
    FINISH_REASONS(X)
#undef X
};

void metrics_spawned(struct model_metrics *m, int warmth, double ms)
{
    int i = MAX(warmth - 1, 0); /* the API's COLD is 1 */

    metrics_observe(&m->spawn[MIN(i, 3)].time, BOUNDS_spawn, ms / 1e3);
}

void metrics_phase(struct model_metrics *m, const char *name, double ms)
{
    for (size_t i = 0; i < ARRAY_LEN(phase_names); i++)
        if (!strcmp(phase_names[i], name))
            metrics_observe(&m->phase[i], BOUNDS_spawn, ms / 1e3);
}

/* ---- printing ---- */

struct page {
    struct gw *gw;
    struct buffer *out;
};

static void head(struct page *p, const char *name, const char *type, const char *help)
{
    js_printf(p->out, "# HELP %s %s.\n# TYPE %s %s\n", name, help, name, type);
}

/* model_name="..." with what the format wants escaped. */
static void label(struct page *p, const char *name)
{
    js_raw(p->out, "model_name=\"");
    for (; *name; name++) {
        if (*name == '"' || *name == '\\')
            js_raw(p->out, "\\");
        buffer_append(p->out, *name == '\n' ? " " : name, 1);
    }
    js_raw(p->out, "\"");
}

static void value(struct page *p, const char *name, const struct gw_model *model, const char *more,
                  double v)
{
    js_raw(p->out, name);
    js_raw(p->out, "{");
    label(p, model->name);
    js_raw(p->out, more);
    js_printf(p->out, "} %.15g\n", v);
}

static void print_histogram(struct page *p, const char *name, const struct gw_model *model,
                            const char *more, enum metrics_bounds which, const struct histogram *h)
{
    const struct bounds *b = &all_bounds[which];
    char bucket[96], labels[96];
    uint64_t total = 0;

    snprintf(bucket, sizeof bucket, "%s_bucket", name);
    for (unsigned i = 0; i <= b->n; i++) {
        total += h->counts[i];
        if (i < b->n)
            snprintf(labels, sizeof labels, "%s,le=\"%g\"", more, b->at[i]);
        else
            snprintf(labels, sizeof labels, "%s,le=\"+Inf\"", more);
        value(p, bucket, model, labels, (double)total);
    }
    snprintf(bucket, sizeof bucket, "%s_sum", name);
    value(p, bucket, model, more, h->sum);
    snprintf(bucket, sizeof bucket, "%s_count", name);
    value(p, bucket, model, more, (double)total);
}

static uint64_t histogram_count(const struct histogram *h)
{
    uint64_t total = 0;

    for (int i = 0; i < HISTOGRAM_MAX; i++)
        total += h->counts[i];
    return total;
}

/* X(name, type, help, value of `s`, the scheduler's figures, `m` and `model`) */
#define MODEL_VALUES(X)                                                                            \
    X("vllm:num_requests_running", "gauge", "Sequences that run", s.running)                       \
    X("vllm:num_requests_waiting", "gauge", "Sequences that wait", s.waiting)                      \
    X("vllm:kv_cache_usage_perc", "gauge", "Share of KV pages in use, 0 to 1",                     \
      s.pages ? (double)s.pages_used / (double)s.pages : 0)                                        \
    X("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up", s.queried_tokens)   \
    X("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found", s.cached_tokens)           \
    X("vllm:prompt_tokens_total", "counter", "Prompt tokens of requests", m->prompt_tokens)        \
    X("vllm:generation_tokens_total", "counter", "Tokens generated", m->generated_tokens)          \
    X("vllm:num_preemptions_total", "counter", "Sequences taken off to make room", s.preemptions)  \
    X("ember_requests_refused_total", "counter", "Requests refused with 429", s.refused)           \
    X("ember_failovers_total", "counter", "Instances that were replaced", m->failovers)            \
    X("ember_replays_total", "counter", "Sequences replayed on another instance", s.replays)       \
    X("ember_wasted_tokens_total", "counter", "Tokens sampled for nobody", s.wasted_tokens)        \
    X("ember_steps_total", "counter", "Steps planned", s.steps)                                    \
    X("ember_spawn_failures_total", "counter", "Spawns that failed", m->spawn_failures)            \
    X("ember_taken_up_total", "counter", "Leases of an earlier gateway taken up", m->taken_up)     \
    X("ember_backlog_tokens", "gauge", "Prompt tokens that wait", s.backlog_tokens)                \
    X("ember_oldest_wait_seconds", "gauge", "Waiting time of the oldest sequence",                 \
      (double)s.oldest_wait_ns / 1e9)                                                              \
    X("ember_tokens_per_second", "gauge", "Measured speed of one instance", s.tokens_per_s)        \
    X("ember_model_weights_bytes", "gauge", "Bytes of resident weights",                           \
      model->warmth >= 3 && model->warmth <= 5 ? model->weights_bytes : 0)

static bool shown(const struct gw_model *model)
{
    return model->state == GW_MODEL_READY;
}

static void print_values(struct page *p)
{
    const struct gw_model *model;
    uint64_t now = clock_ns();

#define X(name, type, help, expression)                                                            \
    head(p, name, type, help);                                                                     \
    TAILQ_FOREACH(model, &p->gw->models, link)                                                     \
    {                                                                                              \
        const struct model_metrics *m = &model->metrics;                                           \
        struct sched_stats s = {0};                                                                \
        if (!shown(model))                                                                         \
            continue;                                                                              \
        (void)m;                                                                                   \
        sched_model_stats(model->sched, now, &s);                                                  \
        value(p, name, model, "", (double)(expression));                                           \
    }
    MODEL_VALUES(X)
#undef X
}

static void print_histograms(struct page *p)
{
    const struct gw_model *model;

#define X(member, name, bounds, help)                                                              \
    head(p, name, "histogram", help);                                                              \
    TAILQ_FOREACH(model, &p->gw->models, link)                                                     \
    if (shown(model))                                                                              \
        print_histogram(p, name, model, "", BOUNDS_##bounds, &model->metrics.member);
    MODEL_HISTOGRAMS(X)
#undef X
}

/* Spawns by warmth and by phase; those that never happened are left out. */
static void print_spawns(struct page *p)
{
    const struct gw_model *model;
    char more[64];

    head(p, "ember_spawn_seconds", "histogram", "Time of spawns by the warmth they came from");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        for (size_t i = 0; i < ARRAY_LEN(warmth_names); i++) {
            snprintf(more, sizeof more, ",from=\"%s\"", warmth_names[i]);
            if (histogram_count(&model->metrics.spawn[i].time))
                print_histogram(p, "ember_spawn_seconds", model, more, BOUNDS_spawn,
                                &model->metrics.spawn[i].time);
        }
    }
    head(p, "ember_spawn_phase_seconds", "histogram", "Phases of spawns");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        for (size_t i = 0; i < ARRAY_LEN(phase_names); i++) {
            snprintf(more, sizeof more, ",phase=\"%s\"", phase_names[i]);
            if (histogram_count(&model->metrics.phase[i]))
                print_histogram(p, "ember_spawn_phase_seconds", model, more, BOUNDS_spawn,
                                &model->metrics.phase[i]);
        }
    }
}

static void print_labelled(struct page *p)
{
    const struct gw_model *model;
    char more[96];

    head(p, "vllm:request_success_total", "counter", "Choices by the reason of their end");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        for (size_t i = 0; shown(model) && i < ARRAY_LEN(reason_names); i++) {
            snprintf(more, sizeof more, ",finished_reason=\"%s\"", reason_names[i]);
            value(p, "vllm:request_success_total", model, more, (double)model->metrics.finished[i]);
        }
    }
    head(p, "ember_instances", "gauge", "Instances by warmth; starting ones are loading");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        value(p, "ember_instances", model, ",warmth=\"warm\"", model->standby);
        value(p, "ember_instances", model, ",warmth=\"hot\"", model->leased);
        value(p, "ember_instances", model, ",warmth=\"loading\"", model->emberd_starting);
    }
    head(p, "ember_model_warmth", "gauge", "1 cold, 2 loading, 3 parked, 4 warm, 5 hot, 6 failed");
    TAILQ_FOREACH(model, &p->gw->models, link)
    value(p, "ember_model_warmth", model, "", model->warmth);
    head(p, "vllm:cache_config_info", "gauge", "The KV cache's shape");
    TAILQ_FOREACH(model, &p->gw->models, link)
    {
        struct sched_stats s = {0};
        if (!shown(model))
            continue;
        sched_model_stats(model->sched, clock_ns(), &s);
        snprintf(more, sizeof more,
                 ",block_size=\"16\",num_gpu_blocks=\"%llu\",enable_prefix_caching=\"%s\"",
                 (unsigned long long)s.pages, p->gw->options.prefix_cache ? "True" : "False");
        value(p, "vllm:cache_config_info", model, more, 1);
    }
    head(p, "vllm:lora_requests_info", "gauge", "Adapters in use: none are supported");
    js_raw(p->out, "vllm:lora_requests_info{max_lora=\"0\",running_lora_adapters=\"\","
                   "waiting_lora_adapters=\"\"} 0\n");
}

static double resident_bytes(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");

    if (f && fscanf(f, "%*u %llu", &pages) != 1)
        pages = 0;
    if (f)
        fclose(f);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

void metrics_print(struct gw *gw, struct buffer *out)
{
    struct page p = {gw, out};

    print_values(&p);
    print_histograms(&p);
    print_spawns(&p);
    print_labelled(&p);
    head(&p, "ember_gateway_requests", "gauge", "Requests that have not ended");
    js_printf(out, "ember_gateway_requests %u\n", gw->n_jobs);
    head(&p, "process_resident_memory_bytes", "gauge", "Resident memory of the gateway");
    js_printf(out, "process_resident_memory_bytes %.0f\n", resident_bytes());
}
