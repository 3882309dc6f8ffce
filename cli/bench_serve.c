/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emberctl bench serve: what serving costs, through the whole path: HTTP, scheduler, step protocol,
 * instance. emberd and gateway are private ones. Figures are ratios within one run; the client and
 * the model share the processor with the gateway, whose own time is read from its CPU clock.
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/fd.h"
#include "base/value.h"
#include "cli/bench_model.h"
#include "cli/commands.h"
#include "cli/measure.h"
#include "cli/output.h"
#include "cli/serve_lab.h"
#include "cli/shapes.h"
#include "scheduler/bench.h"

#define STREAMS_MAX 1024
#define PATH "/v1/completions"
#define CONFIG_MAX (1u << 20)

struct bench {
    const struct verb_call *call;
    const char *name;
    char *model;
    uint32_t vocab;
    bool made;       /* a shape: it has no tokenizer of its own */
    uint32_t output; /* tokens of a stream */
    uint32_t prompt; /* tokens of the prompts whose TTFT is measured */
    struct serve_lab lab;
    struct load_stream streams[STREAMS_MAX];
    char *bodies[STREAMS_MAX];
    size_t n;
    double step_ms; /* of 64 sequences */
    uint64_t seed;  /* other prompts each time: nothing comes from the prefix cache by accident */
    json_t *rows;
};

static void row(struct bench *b, const char *what, double value, const char *unit,
                const char *limit, int met)
{
    static const char *const words[] = {"missed", "met"};
    char text[64];

    snprintf(text, sizeof text, unit[0] == 'x' ? "%.2f%s" : "%.2f %s", value, unit);
    json_array_append_new(b->rows,
                          json_pack("{s:s, s:s, s:s, s:f, s:s, s:s, s:o}", "model", b->name, "what",
                                    what, "text", text, "value", value, "unit", unit, "limit",
                                    limit, "met", met < 0 ? json_null() : json_boolean(met)));
    if (cli_json(b->call))
        return;
    printf("  %-66s %13s   %s%s%s\n", what, text, limit, met < 0 ? "" : ": ",
           met < 0 ? "" : words[met]);
    fflush(stdout);
}

static void at_most(struct bench *b, const char *what, double value, const char *unit, double limit)
{
    char text[48];

    snprintf(text, sizeof text, "target <= %g %s", limit, unit);
    row(b, what, value, unit, text, value <= limit);
}

static void at_least(struct bench *b, const char *what, double value, const char *unit,
                     double limit)
{
    char text[48];

    snprintf(text, sizeof text, "target >= %g %s", limit, unit);
    row(b, what, value, unit, text, value >= limit);
}

static void note(struct bench *b, const char *what, double value, const char *unit)
{
    row(b, what, value, unit, "", -1);
}

/* ---- requests ---- */

static void forget(struct bench *b)
{
    for (size_t i = 0; i < b->n; i++)
        free(b->bodies[i]);
    b->n = 0;
}

static struct load_stream *add(struct bench *b, const struct serve_ask *ask)
{
    struct serve_ask own = *ask;
    struct load_stream *stream = &b->streams[b->n];

    own.vocab = b->vocab;
    own.seed = ask->seed ? ask->seed : ++b->seed;
    b->bodies[b->n] = serve_body(&own);
    *stream = (struct load_stream){.path = PATH, .body = b->bodies[b->n++]};
    return stream;
}

static int check(const struct bench *b, size_t first, size_t n, uint32_t tokens, struct error *err)
{
    for (size_t i = first; i < first + n; i++)
        if (!b->streams[i].complete || b->streams[i].tokens != tokens)
            return error_set(err, EPROTO, "stream %zu: status %d, %u tokens of %u%s %s", i,
                             b->streams[i].status, b->streams[i].tokens, tokens,
                             b->streams[i].complete ? "" : ", and no end", b->streams[i].error);
    return 0;
}

static int go(struct bench *b, unsigned connections, struct error *err)
{
    struct load_run run = {.port = b->lab.port, .connections = connections, .until = SIZE_MAX};

    return load_run(&run, b->streams, b->n, err);
}

/* `n` alike at once. */
static int go_together(struct bench *b, unsigned n, uint32_t prompt, uint32_t output,
                       struct error *err)
{
    forget(b);
    for (unsigned i = 0; i < n; i++)
        add(b, &(struct serve_ask){.n_prompt = prompt, .n_output = output, .user = i});
    int r = go(b, n, err);
    return r == 0 ? check(b, 0, n, output, err) : r;
}

static double ttft_ms(const struct load_stream *s)
{
    return (double)(s->first_ns - s->sent_ns) / 1e6;
}

/* Time between two tokens of a stream, median of the streams. */
static double step_ms(const struct bench *b)
{
    double ms[STREAMS_MAX];

    for (size_t i = 0; i < b->n; i++)
        ms[i] = (double)(b->streams[i].last_ns - b->streams[i].first_ns) / 1e6 /
                MAX(b->streams[i].tokens - 1, 1u);
    return quantile(ms, b->n, 0.5);
}

/* Tokens a second of all streams from the first request to the last token. */
static double rate(const struct bench *b)
{
    uint64_t first = UINT64_MAX, last = 0, tokens = 0;

    for (size_t i = 0; i < b->n; i++) {
        first = MIN(first, b->streams[i].sent_ns);
        last = MAX(last, b->streams[i].last_ns);
        tokens += b->streams[i].tokens;
    }
    return (double)tokens / ((double)(last - first) / 1e9);
}

/* ---- figures ---- */

static int scheduler(struct bench *b, struct error *err)
{
    static const struct {
        uint32_t n;
        double target;
    } sizes[] = {{64, 50}, {512, 300}};
    char what[64];

    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        double us;
        int r = sched_bench(sizes[i].n, 10, clock_ns, &us, err);
        if (r < 0)
            return r;
        snprintf(what, sizeof what, "scheduler, a step of %u sequences", sizes[i].n);
        at_most(b, what, us, "us", sizes[i].target);
    }
    return 0;
}

/* Reads the gateway's CPU clock when every stream has begun: what a request costs is another
 * figure. */
struct meter {
    struct bench *b;
    uint64_t ns;
};

static void read_meter(void *ctx)
{
    struct meter *meter = ctx;

    meter->ns = serve_lab_cpu_ns(&meter->b->lab);
}

/* n streams at once; microseconds of the gateway's CPU for a token once all have begun, and for a
 * request until then. */
static int metered(struct bench *b, unsigned n, double *ret_token_us, double *ret_request_us,
                   struct error *err)
{
    uint64_t events = 2 * (uint64_t)n, start;
    struct meter meter = {.b = b};
    struct load_run run = {.port = b->lab.port,
                           .connections = n,
                           .until = SIZE_MAX,
                           .at_events = events,
                           .at = read_meter,
                           .ctx = &meter};

    forget(b);
    for (unsigned i = 0; i < n; i++)
        add(b, &(struct serve_ask){.n_prompt = 8, .n_output = b->output, .user = i});
    start = serve_lab_cpu_ns(&b->lab);
    int r = load_run(&run, b->streams, b->n, err);
    if (r == 0)
        r = check(b, 0, n, b->output, err);
    double tokens = (double)n * b->output - (double)events;
    *ret_token_us = (double)(serve_lab_cpu_ns(&b->lab) - meter.ns) / 1e3 / tokens;
    *ret_request_us = fmax(0, (double)(meter.ns - start) / 1e3 / n - 2 * *ret_token_us);
    return r;
}

/* The first instance compiles kernels and adopts graphs meanwhile: nothing is measured before. */
static int settle(struct bench *b, struct error *err)
{
    double ms = (double)verb_int(b->call, "settle") * 1e3;
    uint64_t start = clock_ns();
    int r = 0;

    do
        r = go_together(b, 4, 64, 8, err);
    while (r == 0 && clock_ms_since(start) < ms);
    return r;
}

/* Streams together against one alone, and what a token costs the gateway meanwhile. */
static int throughput(struct bench *b, struct error *err)
{
    static const unsigned counts[] = {1, 16, 64};
    double alone = 0;
    char what[96];

    for (size_t i = 0; i < ARRAY_LEN(counts); i++) {
        unsigned n = counts[i];
        double us = INFINITY, request_us = INFINITY, tokens_s = 0;
        int r = 0;
        for (int turn = 0; turn < 2 && r == 0;
             turn++) { /* the better: others use the machine, too */
            double token = 0, request = 0;
            r = metered(b, n, &token, &request, err);
            us = fmin(us, token);
            request_us = fmin(request_us, request);
            tokens_s = fmax(tokens_s, rate(b));
        }
        if (r < 0)
            return r;
        alone = n == 1 ? tokens_s : alone;
        b->step_ms = step_ms(b);
        snprintf(what, sizeof what, "%u stream%s", n, n == 1 ? " alone" : "s together");
        note(b, what, tokens_s, "tokens/s");
        if (n == 1) /* each token is a step of its own: what wakes the gateway is not shared */
            note(b, "  gateway, CPU of a streamed token", us, "us");
        else
            at_most(b, "  gateway, CPU of a streamed token", us, "us", 15);
        note(b, "  and of a request, until its second token", request_us, "us");
        if (n == 16)
            at_least(b, "  against one alone", tokens_s / alone, "x", 4);
    }
    return 0;
}

/* Prompts one after another: alone, and beside streams that decode. */
static int first_tokens(struct bench *b, struct error *err)
{
    enum { PROBES = 12, BESIDE = 8 };
    double idle[PROBES], busy[PROBES];
    struct serve_ask probe = {.n_prompt = b->prompt, .n_output = 1, .user = 100};
    char what[96];

    forget(b);
    for (int i = 0; i < PROBES; i++)
        add(b, &probe);
    int r = go(b, 1, err);
    for (int i = 0; i < PROBES; i++)
        idle[i] = ttft_ms(&b->streams[i]);
    forget(b);
    for (unsigned i = 0; i < BESIDE; i++)
        add(b, &(struct serve_ask){.n_prompt = 8, .n_output = 1500, .user = i});
    for (int i = 0; i < PROBES; i++)
        add(b, &probe);
    struct load_run run = {
        .port = b->lab.port, .connections = BESIDE + 1, .until = BESIDE + PROBES - 1};
    if (r == 0)
        r = load_run(&run, b->streams, b->n, err);
    if (r == 0)
        r = check(b, BESIDE, PROBES, 1, err);
    if (r < 0)
        return r;
    for (int i = 0; i < PROBES; i++)
        busy[i] = ttft_ms(&b->streams[BESIDE + i]);
    double alone = quantile(idle, PROBES, 0.5), worst = quantile(busy, PROBES, 0.99);
    snprintf(what, sizeof what, "TTFT of %u tokens on an idle server, median of %d", b->prompt,
             PROBES);
    note(b, what, alone, "ms");
    snprintf(what, sizeof what, "TTFT beside %d streams, median", BESIDE);
    note(b, what, quantile(busy, PROBES, 0.5), "ms");
    snprintf(what, sizeof what, "  the worst of %d, against the idle server's", PROBES);
    at_most(b, what, worst / alone, "x", 2);
    return 0;
}

static int shared_prefix(struct bench *b, struct error *err)
{
    enum { TIMES = 3, SHARED = 1000, OWN = 16 };
    double first[TIMES], second[TIMES];

    for (int i = 0; i < TIMES; i++) {
        struct serve_ask ask = {
            .n_prompt = SHARED + OWN, .n_output = 1, .n_shared = SHARED, .shared = ++b->seed};
        forget(b);
        add(b, &ask);
        add(b, &ask);
        int r = go(b, 1, err);
        if (r == 0)
            r = check(b, 0, 2, 1, err);
        if (r < 0)
            return r;
        first[i] = ttft_ms(&b->streams[0]);
        second[i] = ttft_ms(&b->streams[1]);
    }
    double cold = quantile(first, TIMES, 0.5), warm = quantile(second, TIMES, 0.5);
    note(b, "TTFT of 1,016 tokens, nothing cached", cold, "ms");
    note(b, "TTFT of another with the same first 1,000", warm, "ms");
    at_most(b, "  the second against the first", warm / cold, "x", 0.1);
    return 0;
}

/* No instance anywhere: the request makes one. */
static int parked(struct bench *b, struct error *err)
{
    enum { TIMES = 5, PROMPT = 32 };
    double empty[TIMES], hot[TIMES];
    int r = 0;

    for (int i = 0; i < TIMES && r == 0; i++) {
        r = serve_lab_clear(&b->lab, err);
        forget(b);
        for (int k = 0; k < 2; k++)
            add(b, &(struct serve_ask){.n_prompt = PROMPT, .n_output = 1});
        if (r == 0)
            r = go(b, 1, err);
        if (r == 0)
            r = check(b, 0, 2, 1, err);
        empty[i] = ttft_ms(&b->streams[0]);
        hot[i] = ttft_ms(&b->streams[1]);
    }
    if (r < 0)
        return r;
    double first = quantile(empty, TIMES, 0.5), next = quantile(hot, TIMES, 0.5);
    note(b, "parked model, no instance: first byte", first, "ms");
    at_most(b, "  beyond the same request to a warm instance", first - next, "ms", 100);
    return 0;
}

/* One client has as many requests waiting as there is room for; another one's comes. */
static int fairness(struct bench *b, struct error *err)
{
    enum { CROWD = 1000 };
    struct serve_ask one = {.n_prompt = 8, .n_output = 1, .user = 2};
    struct load_run run = {.port = b->lab.port, .connections = CROWD + 1, .until = CROWD};

    int r = b->step_ms > 0 ? 0 : go_together(b, 64, 8, b->output, err);
    b->step_ms = b->step_ms > 0 ? b->step_ms : step_ms(b);
    forget(b);
    add(b, &one);
    if (r == 0)
        r = go(b, 1, err);
    double alone = ttft_ms(&b->streams[0]);
    forget(b);
    for (int i = 0; i < CROWD; i++)
        add(b, &(struct serve_ask){.n_prompt = 8, .n_output = 64, .user = 1});
    add(b, &one)->after_events = CROWD; /* by then all of the crowd are in the queue */
    if (r == 0)
        r = load_run(&run, b->streams, b->n, err);
    if (r == 0)
        r = check(b, CROWD, 1, 1, err);
    if (r < 0)
        return r;
    double crowded = ttft_ms(&b->streams[CROWD]);
    note(b, "TTFT of a small request, alone", alone, "ms");
    note(b, "  behind 1,000 of another client's", crowded, "ms");
    at_most(b, "  steps of 64 sequences before its own", crowded / b->step_ms - 1, "steps", 1.5);
    return 0;
}

struct killer {
    struct bench *b;
    struct error err;
    int result;
};

static void kill_one(void *ctx)
{
    struct killer *k = ctx;
    int32_t pids[4];
    size_t n = 0;

    k->result = serve_lab_instances(&k->b->lab, pids, ARRAY_LEN(pids), &n, &k->err);
    if (k->result == 0 && !n)
        k->result = error_set(&k->err, ESRCH, "no instance is leased");
    for (size_t i = 0; i < n && i < 1; i++)
        kill(pids[i], SIGKILL);
}

static int failover(struct bench *b, struct error *err)
{
    enum { STREAMS = 32 };
    uint64_t want[STREAMS], pause = 0;
    struct killer killer = {.b = b};
    unsigned same = 0;

    forget(b);
    for (unsigned i = 0; i < STREAMS; i++)
        add(b, &(struct serve_ask){.n_prompt = 8, .n_output = b->output, .user = i});
    int r = go(b, STREAMS, err);
    for (int i = 0; i < STREAMS; i++)
        want[i] = b->streams[i].digest;
    struct load_run run = {.port = b->lab.port,
                           .connections = STREAMS,
                           .until = SIZE_MAX,
                           .at_events = STREAMS * b->output / 2,
                           .at = kill_one,
                           .ctx = &killer};
    if (r == 0)
        r = load_run(&run, b->streams, b->n, err);
    if (r == 0 && killer.result < 0) {
        *err = killer.err;
        r = killer.result;
    }
    if (r == 0)
        r = check(b, 0, STREAMS, b->output, err);
    if (r < 0)
        return r;
    for (int i = 0; i < STREAMS; i++) {
        same += b->streams[i].digest == want[i];
        pause = MAX(pause, b->streams[i].longest_ns);
    }
    note(b, "kill -9 of the instance under 32 streams: longest pause of one", (double)pause / 1e6,
         "ms");
    at_least(b, "  streams with the text they had undisturbed", same, "of 32", 32);
    return 0;
}

/* ---- metrics with ten models ---- */

#define MODELS 10

static int no_progress(void *ctx, const ProtobufCMessage *message)
{
    return 0;
}

/* Ten names for one small checkpoint. */
static int load_ten(struct bench *b, const char *tiny, struct error *err)
{
    _cleanup_(control_freep) struct control *control = NULL;
    char name[32];
    int r = lab_control(&b->lab.lab, &control, err);

    for (int i = 0; i < MODELS && r == 0; i++) {
        Ember__V1__LoadModelRequest request = EMBER__V1__LOAD_MODEL_REQUEST__INIT;
        snprintf(name, sizeof name, "model-%d", i);
        request.path = (char *)tiny;
        request.name = name;
        r = control_stream(control, "LoadModel", &request.base,
                           &ember__v1__load_progress__descriptor, no_progress, NULL, err);
    }
    return r;
}

/* A request to each, so that each has figures; the gateway learns of new models as they are asked
 * for. */
static int ask_ten(struct bench *b, struct error *err)
{
    forget(b);
    for (int i = 0; i < MODELS; i++) {
        b->bodies[i] = x_printf("{\"model\":\"model-%d\",\"prompt\":[300],\"max_tokens\":2}", i);
        b->streams[b->n++] = (struct load_stream){.path = PATH, .body = b->bodies[i]};
    }
    int r = go(b, 1, err);
    for (int i = 0; i < MODELS && r == 0; i++)
        if (!b->streams[i].complete)
            r = error_set(err, EPROTO, "model-%d: status %d", i, b->streams[i].status);
    return r;
}

static int scrapes(struct bench *b, struct error *err)
{
    enum { SCRAPES = 200 };
    static const char *const options[] = {"--max-instances=1", NULL};
    _cleanup_free_ char *tiny = NULL;
    double ms[SCRAPES];

    serve_lab_free(&b->lab);
    int r = value_expand("%D/models/ember-tiny", &tiny, err);
    struct lab_options emberd = {.model = tiny, .kv_bytes = 16 * MIB};
    if (r == 0)
        r = serve_lab_start(&b->lab, &emberd, options, 0, err);
    if (r == 0)
        r = load_ten(b, tiny, err);
    if (r == 0)
        r = ask_ten(b, err);
    forget(b);
    for (int i = 0; i < SCRAPES; i++) {
        b->bodies[b->n] = NULL;
        b->streams[b->n++] = (struct load_stream){.path = "/metrics"};
    }
    uint64_t cpu = serve_lab_cpu_ns(&b->lab);
    if (r == 0)
        r = go(b, 1, err);
    if (r < 0)
        return r;
    double each = (double)(serve_lab_cpu_ns(&b->lab) - cpu) / 1e6 / SCRAPES;
    for (int i = 0; i < SCRAPES; i++)
        ms[i] = (double)(b->streams[i].last_ns - b->streams[i].sent_ns) / 1e6;
    note(b, "/metrics of 10 models in use: time of a scrape, median", quantile(ms, SCRAPES, 0.5),
         "ms");
    at_most(b, "  CPU of the gateway", each, "ms", 1);
    return 0;
}

/* ---- the verb ---- */

static int read_vocab(struct bench *b, struct error *err)
{
    _cleanup_free_ char *path = x_printf("%s/config.json", b->model), *text = NULL;
    _cleanup_(model_freep) struct model *model = NULL;
    size_t len;

    int r = fd_read_file(path, CONFIG_MAX, &text, &len, err);
    if (r == 0)
        r = model_from_config(text, len, path, &model, err);
    if (r == 0)
        b->vocab = model_info(model)->vocab_size;
    if (r == 0 && b->vocab < 512)
        r = error_set(err, ENOTSUP, "%s: a vocabulary of %u is too small for this", path, b->vocab);
    return r;
}

static int bench_model(struct bench *b, struct error *err)
{
    static const char *const options[] = {"--max-instances=1", "--idle-release=1h",
                                          "--max-queue=4096", NULL};
    /* As --figure names them. */
    static int (*const figures[])(struct bench *, struct error *) = {
        throughput, first_tokens, shared_prefix, parked, fairness, failover, scrapes};
    int only = verb_choice(b->call, "figure");
    struct lab_options emberd = {.model = b->model,
                                 .kv_bytes = (uint64_t)verb_int(b->call, "kv-mib") * MIB};

    int r = read_vocab(b, err);
    if (r == 0)
        r = serve_lab_start(&b->lab, &emberd, options, b->made ? b->vocab : 0, err);
    if (r == 0)
        r = settle(b, err);
    for (size_t i = 0; i < ARRAY_LEN(figures) && r == 0; i++)
        if (only < 0 || only == (int)i)
            r = figures[i](b, err);
    serve_lab_free(&b->lab);
    forget(b);
    return r;
}

int run_bench_serve(const struct verb_call *call)
{
    static char *shape[] = {"qwen3-0.6b"};
    char **names = call->argc ? call->argv : shape;
    int n = call->argc ? call->argc : 1;
    struct bench *b = x_alloc(sizeof *b);
    struct error err = {0};

    *b = (struct bench){.call = call,
                        .name = "",
                        .output = (uint32_t)verb_int(call, "output"),
                        .prompt = (uint32_t)verb_int(call, "prompt"),
                        .lab.lab.notify = -1,
                        .rows = json_array()};
    cli_catch_interrupts();
    fd_raise_limit();
    signal(SIGPIPE, SIG_IGN);
    int r = scheduler(b, &err);
    for (int i = 0; i < n && r == 0; i++) {
        _cleanup_free_ char *config = shape_config(names[i]);
        b->name = names[i];
        b->made = config;
        r = bench_model_find(call, names[i], 0, &b->model, &err);
        if (r == 0 && !cli_json(call))
            printf("%s\n", names[i]);
        if (r == 0)
            r = bench_model(b, &err);
        free(TAKE(b->model));
    }
    if (cli_json(call))
        cli_print_json(json_incref(b->rows));
    json_decref(b->rows);
    free(b);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}
