/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ember-sim: the scheduler's policies on paper. `ember-sim run` plays a trace on a simulated fleet
 * and prints what its clients and its owner would see; `ember-sim bench` measures what the
 * scheduler itself costs a step.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/verbs.h"
#include "scheduler/bench.h"
#include "sim.h"

static const struct verb_option run_options[] = {
    {"trace", VALUE_PATH, .help = "file of lines: at_ms client n_prompt max_tokens [group shared]"},
    {"requests", VALUE_INT, "1000", "1..10000000", "without a trace: so many requests"},
    {"rate", VALUE_INT, "10", "0..1000000", "arrivals a second, Poisson; 0: all at once"},
    {"clients", VALUE_INT, "10", "1..1000000", "who ask, each as often"},
    {"prompt", VALUE_INT, "500", "1..1000000", "longest prompt, tokens; shortest a fifth"},
    {"output", VALUE_INT, "200", "1..1000000", "longest output, tokens; shortest a fifth"},
    {"groups", VALUE_INT, "0", "0..1000000", "groups of requests that share a prefix"},
    {"shared", VALUE_INT, "200", "1..1000000", "tokens of that prefix"},
    {"seed", VALUE_INT, "1", "0..", "of trace, failures and tokens"},
    {"instances", VALUE_INT, "1", "0..100000", "at the start"},
    {"scale", VALUE_BOOL, "no", .help = "let the scheduler start and end instances"},
    {"max-instances", VALUE_INT, "1", "1..100000", "with --scale"},
    {"standby", VALUE_INT, "0", "0..100000", "with --scale: idle ones kept ready"},
    {"spawn", VALUE_DURATION, "100ms", "0..", "how long a start takes"},
    {"idle", VALUE_DURATION, "60s", "0..", "with --scale: given back after"},
    {"pages", VALUE_INT, "4096", "1..10000000", "KV pages of an instance"},
    {"page-size", VALUE_INT, "16", "1..4096", "tokens of a page"},
    {"tokens", VALUE_INT, "512", "1..1000000", "most tokens a step"},
    {"seqs", VALUE_INT, "64", "1..65536", "most sequences a step"},
    {"prefill", VALUE_INT, "0", "0..1000000", "most prompt tokens beside decodes; 0: no limit"},
    {"step-time", VALUE_DURATION, "200ms", "0..",
     "prompts are cut so that a step takes that; 0: no"},
    {"queue", VALUE_INT, "100000", "1..", "most sequences that wait"},
    {"refs", VALUE_BOOL, "yes", .help = "two steps in flight, by reference"},
    {"joins", VALUE_BOOL, "yes", .help = "newcomers join the second of them"},
    {"prefix-cache", VALUE_BOOL, "yes", .help = "share pages between requests"},
    {"step", VALUE_INT, "5000", "0..", "a step's time, microseconds,"},
    {"per-token", VALUE_INT, "50", "0..", "plus this for a token"},
    {"per-seq", VALUE_INT, "20", "0..", "plus this for a sequence"},
    {"deaths", VALUE_INT, "0", "0..1000000", "of an instance, in 1,000 seconds"},
    {"check", VALUE_BOOL, "no", .help = "simulate the content of every page (slow)"},
    {0},
};

static uint32_t number(const struct verb_call *call, const char *name)
{
    return (uint32_t)verb_int(call, name);
}

static struct sim_config config_of(const struct verb_call *call)
{
    struct sim_config c = {.seed = (uint64_t)verb_int(call, "seed"),
                           .instances = number(call, "instances"),
                           .scale = verb_flag(call, "scale"),
                           .spawn_ns = verb_duration(call, "spawn"),
                           .step_ns = (double)verb_int(call, "step") * 1e3,
                           .token_ns = (double)verb_int(call, "per-token") * 1e3,
                           .seq_ns = (double)verb_int(call, "per-seq") * 1e3,
                           .death_rate = (double)verb_int(call, "deaths") / 1e3,
                           .content = verb_flag(call, "check"),
                           .verify_every = verb_flag(call, "check") ? 100 : 0};

    c.model = (struct sched_model_config){.max_queue = number(call, "queue"),
                                          .prefill_tokens = number(call, "prefill"),
                                          .step_ns = verb_duration(call, "step-time"),
                                          .no_prefix_cache = !verb_flag(call, "prefix-cache"),
                                          .max_instances = number(call, "max-instances"),
                                          .standby = number(call, "standby"),
                                          .idle_ns = verb_duration(call, "idle")};
    c.limits = (struct sched_limits){.pages = number(call, "pages"),
                                     .page_size = number(call, "page-size"),
                                     .max_tokens = number(call, "tokens"),
                                     .max_seqs = number(call, "seqs"),
                                     .max_positions = 1u << 20,
                                     .token_refs = verb_flag(call, "refs"),
                                     .joins = verb_flag(call, "joins")};
    return c;
}

static struct sim_request *made(const struct verb_call *call, size_t *ret_n)
{
    struct sim_shape shape = {.seed = (uint64_t)verb_int(call, "seed"),
                              .n = number(call, "requests"),
                              .clients = number(call, "clients"),
                              .rate = (double)verb_int(call, "rate"),
                              .prompt_min = number(call, "prompt") / 5,
                              .prompt_max = number(call, "prompt"),
                              .output_min = number(call, "output") / 5,
                              .output_max = number(call, "output"),
                              .groups = number(call, "groups"),
                              .shared = number(call, "shared")};
    *ret_n = shape.n;
    return sim_trace(&shape);
}

static void print_report(const struct sim_report *r, double wall_ms)
{
    const struct sched_stats *s = &r->stats;
    double queried = s->queried_tokens ? (double)s->queried_tokens : 1;

#define N(x) ((unsigned long long)(x))
    printf("requests      %llu: stop %llu, length %llu, cancelled %llu, timeout %llu, "
           "too long %llu, error %llu, refused %llu\n",
           N(r->requests), N(r->finished[SCHED_STOP]), N(r->finished[SCHED_LENGTH]),
           N(r->finished[SCHED_CANCELLED]), N(r->finished[SCHED_TIMEOUT]),
           N(r->finished[SCHED_TOO_LONG]), N(r->finished[SCHED_ERROR]), N(r->refused));
    printf("time          %.3f s simulated, %.0f tokens/s (%.0f ms of this processor)\n",
           r->seconds, r->seconds > 0 ? (double)r->tokens / r->seconds : 0, wall_ms);
    printf("TTFT          p50 %.1f ms, p99 %.1f ms\n", r->ttft_p50, r->ttft_p99);
    printf("inter-token   p50 %.1f ms, p99 %.1f ms\n", r->itl_p50, r->itl_p99);
    printf("end to end    p50 %.1f ms\n", r->e2e_p50);
    printf("steps         %llu of %.1f sequences, %llu joined another; instances busy %.1f %%\n",
           N(r->steps), r->batch, N(r->joined), r->busy * 100);
    printf("instances     %llu started, %llu at most, %.0f s in all, %llu died\n", N(r->spawns),
           N(r->peak_instances), r->instance_seconds, N(r->deaths));
    printf("prompt        %llu tokens computed, %llu from the cache (%.1f %% of those asked for)\n",
           N(s->prompt_tokens), N(s->cached_tokens), 100 * (double)s->cached_tokens / queried);
    printf("taken off     %llu for pages or fairness, %llu by deaths; %llu tokens for nobody\n",
           N(s->preemptions), N(s->replays), N(s->wasted_tokens));
}

static int run_run(const struct verb_call *call)
{
    const char *path = verb_string(call, "trace");
    struct sim_config config = config_of(call);
    _cleanup_free_ struct sim_request *requests = NULL;
    struct sim_report report;
    struct error err = {0};
    size_t n = 0;

    if (path && sim_trace_read(path, &requests, &n, &err) < 0) {
        fprintf(stderr, "ember-sim: %s\n", error_text(&err));
        return 1;
    }
    if (!path)
        requests = made(call, &n);
    uint64_t start = clock_ns();
    if (sim_run(&config, requests, n, &report, &err) < 0) {
        fprintf(stderr, "ember-sim: %s\n", error_text(&err));
        return 1;
    }
    print_report(&report, clock_ms_since(start));
    return 0;
}

/* ---- bench ---- */

static int run_bench(const struct verb_call *call)
{
    static const struct {
        uint32_t n;
        double target;
    } sizes[] = {{64, 50}, {512, 300}};
    int rc = 0;

    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        struct error err = {0};
        double us;
        if (sched_bench(sizes[i].n, 10, clock_ns, &us, &err) < 0) {
            fprintf(stderr, "ember-sim: %s\n", error_text(&err));
            return 1;
        }
        bool met = us <= sizes[i].target;
        printf("%4u sequences   %7.1f us a step   (target %.0f us: %s)\n", sizes[i].n, us,
               sizes[i].target, met ? "met" : "missed");
        rc |= !met && verb_flag(call, "strict");
    }
    return rc;
}

static const struct verb_option bench_options[] = {
    {"strict", VALUE_BOOL, "no", .help = "a missed target is an error"},
    {0},
};

static const struct verb verbs[] = {
    {"run", "", "play a trace on a simulated fleet", .options = run_options,
     .examples = "run --rate=20 --instances=4\tPoisson arrivals on four instances\n"
                 "run --scale --max-instances=50 --rate=200\tlet it grow\n",
     .run = run_run},
    {"bench", "", "what the scheduler costs a step", .options = bench_options, .run = run_bench},
    {0},
};

static const struct verb_option globals[] = {{0}};

static const struct verb_program program = {
    .name = "ember-sim",
    .version = EMBER_VERSION,
    .summary = "tries the scheduler's policies on simulated fleets",
    .globals = globals,
    .verbs = verbs,
};

int main(int argc, char **argv)
{
    struct verb_call *call = NULL;
    struct buffer text = {0};
    struct error err = {0};
    int rc = verb_parse(&program, argc, argv, &call, &text, &err);

    if (rc < 0) {
        fprintf(stderr, "ember-sim: %s\n", error_text(&err));
        rc = 2;
    } else if (rc == VERB_TEXT) {
        fputs(text.data ? text.data : "", stdout);
        rc = 0;
    } else {
        rc = call->verb->run(call);
    }
    verb_call_free(call);
    buffer_free(&text);
    return rc;
}
