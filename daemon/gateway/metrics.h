/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Figures, and their text form (Prometheus exposition format 0.0.4): vllm:* families with vLLM's
 * names, labels and buckets, so that what scrapes vLLM works as it is, and ember_*. metrics.c
 * counts, metrics_text.c prints: some scrape every 50 ms, so a line is a few copies and no printf.
 */
#ifndef EMBER_DAEMON_GATEWAY_METRICS_H
#define EMBER_DAEMON_GATEWAY_METRICS_H

#include <stdint.h>

#include "base/mem.h"

struct gw;

#define HISTOGRAM_MAX 24

/* Bucket i counts values up to the bounds' i-th; the last one counts all that are larger. */
struct histogram {
    uint64_t counts[HISTOGRAM_MAX];
    double sum;
};

/*
 * X(bounds, how many, B(value as a number, as text), ...): texts as vLLM's exporter writes them.
 * The lists of vLLM are in its vllm/v1/metrics/loggers.py.
 */
#define METRIC_BOUNDS(X, B)                                                                        \
    X(ttft, B(0.001, "0.001") B(0.005, "0.005") B(0.01, "0.01") B(0.02, "0.02") B(0.04, "0.04")    \
                B(0.06, "0.06") B(0.08, "0.08") B(0.1, "0.1") B(0.25, "0.25") B(0.5, "0.5")        \
                    B(0.75, "0.75") B(1, "1.0") B(2.5, "2.5") B(5, "5.0") B(7.5, "7.5")            \
                        B(10, "10.0") B(20, "20.0") B(40, "40.0") B(80, "80.0") B(160, "160.0")    \
                            B(640, "640.0") B(2560, "2560.0"))                                     \
    X(token, B(0.01, "0.01") B(0.025, "0.025") B(0.05, "0.05") B(0.075, "0.075") B(0.1, "0.1")     \
                 B(0.15, "0.15") B(0.2, "0.2") B(0.3, "0.3") B(0.4, "0.4") B(0.5, "0.5")           \
                     B(0.75, "0.75") B(1, "1.0") B(2.5, "2.5") B(5, "5.0") B(7.5, "7.5")           \
                         B(10, "10.0") B(20, "20.0") B(40, "40.0") B(80, "80.0"))                  \
    X(latency,                                                                                     \
      B(0.3, "0.3") B(0.5, "0.5") B(0.8, "0.8") B(1, "1.0") B(1.5, "1.5") B(2, "2.0")              \
          B(2.5, "2.5") B(5, "5.0") B(10, "10.0") B(15, "15.0") B(20, "20.0") B(30, "30.0")        \
              B(40, "40.0") B(50, "50.0") B(60, "60.0") B(120, "120.0") B(240, "240.0")            \
                  B(480, "480.0") B(960, "960.0") B(1920, "1920.0") B(7680, "7680.0"))             \
    X(length, B(1, "1.0") B(2, "2.0") B(5, "5.0") B(10, "10.0") B(20, "20.0") B(50, "50.0")        \
                  B(100, "100.0") B(200, "200.0") B(500, "500.0") B(1000, "1000.0")                \
                      B(2000, "2000.0") B(5000, "5000.0") B(10000, "10000.0") B(20000, "20000.0")  \
                          B(50000, "50000.0") B(100000, "100000.0") B(200000, "200000.0")          \
                              B(500000, "500000.0") B(1000000, "1e+06"))                           \
    X(few, B(1, "1.0") B(2, "2.0") B(5, "5.0") B(10, "10.0") B(20, "20.0"))                        \
    X(iteration, B(1, "1.0") B(8, "8.0") B(16, "16.0") B(32, "32.0") B(64, "64.0") B(128, "128.0") \
                     B(256, "256.0") B(512, "512.0") B(1024, "1024.0") B(2048, "2048.0")           \
                         B(4096, "4096.0") B(8192, "8192.0") B(16384, "16384.0"))                  \
    X(step, B(0.001, "0.001") B(0.0025, "0.0025") B(0.005, "0.005") B(0.01, "0.01")                \
                B(0.025, "0.025") B(0.05, "0.05") B(0.1, "0.1") B(0.25, "0.25") B(0.5, "0.5")      \
                    B(1, "1.0") B(2.5, "2.5") B(10, "10.0"))                                       \
    X(spawn,                                                                                       \
      B(0.0005, "0.0005") B(0.001, "0.001") B(0.0025, "0.0025") B(0.005, "0.005") B(0.01, "0.01")  \
          B(0.025, "0.025") B(0.05, "0.05") B(0.1, "0.1") B(0.25, "0.25") B(0.5, "0.5")            \
              B(1, "1.0") B(2.5, "2.5") B(5, "5.0") B(10, "10.0") B(25, "25.0") B(50, "50.0")      \
                  B(100, "100.0") B(250, "250.0") B(600, "600.0"))

/* X(member, name, bounds, help) */
#define MODEL_HISTOGRAMS(X)                                                                        \
    X(ttft, "vllm:time_to_first_token_seconds", ttft, "Time to first token")                       \
    X(itl, "vllm:inter_token_latency_seconds", token, "Time between tokens of a choice")           \
    X(itl, "vllm:time_per_output_token_seconds", token, "The same under its older name")           \
    X(tpot, "vllm:request_time_per_output_token_seconds", token, "Mean time a token of requests")  \
    X(queue, "vllm:request_queue_time_seconds", latency, "Time until a request's first step")      \
    X(e2e, "vllm:e2e_request_latency_seconds", latency, "Time of whole requests")                  \
    X(inference, "vllm:request_inference_time_seconds", latency, "First step to the end")          \
    X(prefill, "vllm:request_prefill_time_seconds", latency, "First step to first token")          \
    X(decode, "vllm:request_decode_time_seconds", latency, "First token to the last")              \
    X(prompt_len, "vllm:request_prompt_tokens", length, "Tokens of prompts")                       \
    X(output_len, "vllm:request_generation_tokens", length, "Tokens generated for a choice")       \
    X(longest, "vllm:request_max_num_generation_tokens", length, "The longest choice of requests") \
    X(computed, "vllm:request_prefill_kv_computed_tokens", length, "Prompt tokens not cached")     \
    X(max_tokens, "vllm:request_params_max_tokens", length, "max_tokens of requests that set it")  \
    X(n, "vllm:request_params_n", few, "n of requests")                                            \
    X(step_tokens, "vllm:iteration_tokens_total", iteration, "Tokens of a step")                   \
    X(step, "ember_step_seconds", step, "Time of a step, sent to result")

/* X(warmth as the API names it) */
#define SPAWN_WARMTHS(X) X(cold) X(loading) X(parked) X(warm)
/* X(phase as emberd names it) */
#define SPAWN_PHASES(X) X(load) X(exec) X(attach) X(kernels) X(graphs) X(canary) X(ready) X(grant)
#define SPAWN_PHASES_N 8
/* X(reason): how choices end */
#define FINISH_REASONS(X) X(stop) X(length) X(abort) X(error)

struct model_metrics {
    struct histogram ttft, itl, tpot, queue, e2e, inference, prefill, decode, prompt_len,
        output_len, longest, computed, max_tokens, n, step_tokens, step;
    struct histogram spawn[4];              /* by SPAWN_WARMTHS */
    struct histogram phase[SPAWN_PHASES_N]; /* by SPAWN_PHASES */
    uint64_t finished[4];                   /* by FINISH_REASONS */
    uint64_t prompt_tokens, generated_tokens;
    uint64_t cached_tokens; /* of the prompts of requests that have ended */
    uint64_t spawn_failures, failovers, taken_up;
};

enum metrics_bounds {
#define X(name, list) BOUNDS_##name,
#define B(value, text)
    METRIC_BOUNDS(X, B)
#undef B
#undef X
};
struct bounds {
    unsigned n;
    const double *at;
    const char *const *text;
};
extern const struct bounds metrics_bounds[];

void metrics_observe(struct histogram *h, enum metrics_bounds bounds, double value);
#define METRICS_OBSERVE(h, bounds, value) metrics_observe(h, BOUNDS_##bounds, value)

/* A spawn that took ms from `warmth` (enum Warmth of the API). */
void metrics_spawned(struct model_metrics *m, int warmth, double ms);
/* A phase of it. */
void metrics_phase(struct model_metrics *m, const char *name, double ms);

/* The labels of a model's lines, escaped as the format wants it; the caller frees them. */
char *metrics_labels(const char *model);
/* Appends everything. */
void metrics_print(struct gw *gw, struct buffer *out);

#endif
