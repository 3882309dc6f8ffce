/* SPDX-License-Identifier: Apache-2.0 */
/*
 * emberctl bench decode and bench prefill: steps of a model through the engine in this process,
 * beside what the machine could do, measured in the same run.
 */
#include "cli/commands.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cli/bench_model.h"
#include "cli/output.h"
#include "kernels/backend.h"
#include "kernels/bench.h"

#define SHORT_CONTEXT 64 /* positions before the tokens of the plain rows */

struct bench {
    const struct verb_call *call;
    const char *name;
    struct bench_model model;
    struct kernels_bench_machine machine;
    double seconds;
    json_t *rows;
};

/* One line: a figure, what it is of the limit, and the target if the project has one. */
struct line {
    const char *what;
    double value;
    const char *unit;
    double share; /* of the limit; NAN: there is none */
    const char *of;
    const char *target;
    double step_ms;
};

static void put(struct bench *b, const struct line *l)
{
    json_t *row =
        json_pack("{s:s, s:s, s:f, s:s, s:f, s:s}", "model", b->name, "what", l->what, "value",
                  l->value, "unit", l->unit, "step_ms", l->step_ms, "target", l->target);

    if (!isnan(l->share)) {
        json_object_set_new(row, "share", json_real(l->share));
        json_object_set_new(row, "of", json_string(l->of));
    }
    json_array_append_new(b->rows, row);
    if (cli_json(b->call))
        return;
    printf("  %-36s %9.4g %-9s", l->what, l->value, l->unit);
    if (l->step_ms > 0)
        printf(" %9.3f ms a step", l->step_ms);
    if (!isnan(l->share))
        printf("  %5.1f %% of %s", l->share * 100, l->of);
    printf("%s%s\n", *l->target ? "   target " : "", l->target);
    fflush(stdout);
}

static int machine(struct bench *b, struct error *err)
{
    struct kernels_bench_options options = {.threads = (uint32_t)verb_int(b->call, "threads"),
                                            .isa = cli_isa(b->call)};

    return kernels_bench_measure(cpu_backend(), &options, &b->machine, err);
}

static void put_machine(struct bench *b)
{
    json_array_append_new(
        b->rows, json_pack("{s:s, s:s, s:s, s:i, s:f, s:f, s:f, s:f}", "model", b->name, "what",
                           "machine", "device", b->machine.device, "threads",
                           (int)b->machine.threads, "read_bytes_per_s", b->machine.read_bytes_per_s,
                           "flops_per_s", b->machine.flops_per_s, "bf16_per_s",
                           b->machine.bf16_per_s, "int8_per_s", b->machine.int8_per_s));
    if (cli_json(b->call))
        return;
    printf("  ");
    print_machine(&b->machine);
}

/* Where the time of a step goes, by kernels. */
static void put_profile(struct bench *b, const char *what, const struct step_times *t)
{
    json_t *kernels = json_object();

    for (uint32_t i = 0; i < t->n_rows; i++)
        json_object_set_new(kernels, t->rows[i].kernel,
                            json_real((double)t->rows[i].ns / t->profiled / 1e6));
    if (!cli_json(b->call) && t->n_rows) {
        printf("    %s:", what);
        for (uint32_t i = 0; i < t->n_rows && i < 8; i++)
            printf("%s %s %.1f %%", i ? "," : "", t->rows[i].kernel,
                   (double)t->rows[i].ns / 1e4 / t->profiled_ms);
        printf("; outside of kernels %.3f ms a step\n", t->overhead_ms);
    }
    json_array_append_new(b->rows, json_pack("{s:s, s:s, s:o}", "model", b->name, "what",
                                             "kernels, ms a step", "kernels", kernels));
}

/* ---- decode ---- */

static double bandwidth_share(const struct bench *b, const struct step_cost *cost, double ms)
{
    return (cost->weight_bytes + cost->kv_bytes) / (ms / 1e3) / b->machine.read_bytes_per_s;
}

static int decode(struct bench *b, uint32_t streams, double one_stream_ms, struct step_times *ret,
                  struct error *err)
{
    struct bench_load load = {.seqs = streams, .tokens = 1, .position = SHORT_CONTEXT};
    struct step_cost cost;
    char what[64], target[64] = "90 % (q4: 80 %)", of[64] = "read bandwidth";

    int r = bench_model_cost(&b->model, &load, &cost, err);
    if (r == 0)
        r = bench_model_run(&b->model, &load, b->seconds, ret, err);
    if (r < 0)
        return r;
    snprintf(what, sizeof what, "decode, %u stream%s", streams, streams == 1 ? "" : "s");
    if (one_stream_ms > 0) {
        snprintf(of, sizeof of, "read bandwidth, %.1f times one stream",
                 one_stream_ms * streams / ret->ms);
        snprintf(target, sizeof target, "%s", streams == 16 ? "10 times (q8)" : "");
    }
    put(b, &(struct line){what, streams * 1e3 / ret->ms, "tok/s",
                          bandwidth_share(b, &cost, ret->ms), of, target, ret->ms});
    put_profile(b, what, ret);
    return 0;
}

static void put_overhead(struct bench *b, const struct step_times *t)
{
    if (!isnan(t->overhead_ms))
        put(b,
            &(struct line){"graph replay overhead", t->overhead_ms * 1e3, "us",
                           t->overhead_ms / t->ms, "a step", "60 us at tiny size, 3 % at 0.6B", 0});
}

/* One stream behind a long context: what attention reads, and how fast. */
static int long_context(struct bench *b, uint32_t context, struct error *err)
{
    struct bench_load load = {.seqs = 1, .tokens = 1, .position = context - 1};
    struct step_cost cost;
    struct step_times t;
    char what[64];

    int r = bench_model_cost(&b->model, &load, &cost, err);
    if (r == 0)
        r = bench_model_run(&b->model, &load, b->seconds, &t, err);
    if (r < 0)
        return r;
    snprintf(what, sizeof what, "decode, 1 stream at context %u", context);
    put(b, &(struct line){what, 1e3 / t.ms, "tok/s", bandwidth_share(b, &cost, t.ms),
                          "read bandwidth", "", t.ms});
    put_profile(b, what, &t);
    double ms = step_times_of(&t, "attention");
    snprintf(what, sizeof what, "attention at context %u", context);
    if (ms > 0)
        put(b, &(struct line){what, cost.kv_bytes / ms / 1e6, "GB/s",
                              cost.kv_bytes / (ms / 1e3) / b->machine.read_bytes_per_s,
                              "read bandwidth over KV bytes", context >= 8192 ? "70 %" : "", ms});
    return 0;
}

static int bench_decode(struct bench *b, struct error *err)
{
    uint32_t streams = (uint32_t)verb_int(b->call, "streams"), context = 0;
    const struct model_info *info = model_info(b->model.model);
    struct step_cost cost;
    struct step_times one, many;

    context = MIN((uint32_t)verb_int(b->call, "context"), info->max_positions);
    int r = machine(b, err);
    if (r == 0)
        r = bench_model_cost(&b->model, &(struct bench_load){1, 1, SHORT_CONTEXT}, &cost, err);
    if (r < 0)
        return r;
    put_machine(b);
    if (!cli_json(b->call))
        printf("  a token reads %.3f GB of weights; a KV page of %d tokens has %llu bytes\n",
               cost.weight_bytes / 1e9, KV_PAGE_SIZE,
               (unsigned long long)model_info(b->model.model)->kv_page_bytes[b->model.kv]);
    r = decode(b, 1, 0, &one, err);
    if (r == 0)
        put_overhead(b, &one);
    if (r == 0 && streams > 1)
        r = decode(b, streams, one.ms, &many, err);
    if (r == 0 && context)
        r = long_context(b, context, err);
    return r;
}

/* ---- prefill ---- */

static int bench_prefill(struct bench *b, struct error *err)
{
    uint32_t tokens = (uint32_t)verb_int(b->call, "tokens");
    struct bench_load load = {.seqs = 1, .tokens = tokens};
    struct step_cost cost;
    struct step_times t;
    const bool integers = verb_choice(b->call, "quant") > 0;
    char what[64];

    int r = machine(b, err);
    if (r == 0)
        r = bench_model_cost(&b->model, &load, &cost, err);
    if (r < 0)
        return r;
    put_machine(b);
    r = bench_model_run(&b->model, &load, b->seconds, &t, err);
    if (r < 0)
        return r;
    snprintf(what, sizeof what, "prefill, %u tokens", tokens);
    put(b,
        &(struct line){
            what, tokens * 1e3 / t.ms, "tok/s",
            cost.flops / (t.ms / 1e3) / (integers ? b->machine.int8_per_s : b->machine.bf16_per_s),
            integers ? "int8 multiply-adds in registers" : "bf16 multiply-adds in registers",
            "35 % with AMX, 60 % with avx512-vnni", t.ms});
    put_profile(b, what, &t);
    put_overhead(b, &t);
    return 0;
}

/* ---- both ---- */

static int one_model(struct bench *b, uint32_t kv_tokens,
                     int (*run)(struct bench *, struct error *), struct error *err)
{
    int r = bench_model_find(b->call, b->name, (uint32_t)verb_int(b->call, "layers"), &b->model.dir,
                             err);

    if (r == 0 && !cli_json(b->call))
        printf("%s\n", b->name);
    if (r == 0)
        r = bench_model_open(&b->model, b->call, kv_tokens, err);
    if (r == 0)
        r = run(b, err);
    bench_model_free(&b->model);
    return r;
}

static int all_models(const struct verb_call *call, uint32_t kv_tokens,
                      int (*run)(struct bench *, struct error *))
{
    static char *fallback[] = {"qwen3-0.6b"};
    char **names = call->argc ? call->argv : fallback;
    int n = call->argc ? call->argc : 1, r = 0;
    struct bench b = {.call = call, .rows = json_array(), .seconds = verb_real(call, "seconds")};
    struct error err = {0};

    cli_catch_interrupts();
    for (int i = 0; i < n && r == 0; i++) {
        b.name = names[i];
        r = one_model(&b, kv_tokens, run, &err);
    }
    if (cli_json(call))
        cli_print_json(json_incref(b.rows));
    json_decref(b.rows);
    return r < 0 ? cli_fail(call, &err) : CLI_OK;
}

int run_bench_decode(const struct verb_call *call)
{
    uint32_t streams = (uint32_t)verb_int(call, "streams"),
             context = (uint32_t)verb_int(call, "context");

    return all_models(call, MAX(streams * (SHORT_CONTEXT + KV_PAGE_SIZE), context), bench_decode);
}

int run_bench_prefill(const struct verb_call *call)
{
    return all_models(call, (uint32_t)verb_int(call, "tokens"), bench_prefill);
}
