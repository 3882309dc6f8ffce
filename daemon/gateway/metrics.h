/* SPDX-License-Identifier: Apache-2.0 */
/* Figures, and their text form (Prometheus exposition format 0.0.4): vllm:* and ember_* families.
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

/* X(member, name, bounds' table, help) */
#define MODEL_HISTOGRAMS(X)                                                                        \
    X(ttft, "vllm:time_to_first_token_seconds", latency, "Time to first token")                    \
    X(itl, "vllm:inter_token_latency_seconds", token, "Time between tokens of a choice")           \
    X(queue, "vllm:request_queue_time_seconds", latency, "Time until a request's first step")      \
    X(e2e, "vllm:e2e_request_latency_seconds", latency, "Time of whole requests")                  \
    X(prefill, "vllm:request_prefill_time_seconds", latency, "First step to first token")          \
    X(decode, "vllm:request_decode_time_seconds", latency, "First token to the last")              \
    X(prompt_len, "vllm:request_prompt_tokens", length, "Tokens of prompts")                       \
    X(output_len, "vllm:request_generation_tokens", length, "Tokens generated for a choice")       \
    X(step, "ember_step_seconds", token, "Time of a step, sent to result")

/* X(warmth as the API names it) */
#define SPAWN_WARMTHS(X) X(cold) X(loading) X(parked) X(warm)
/* X(phase as emberd names it) */
#define SPAWN_PHASES(X) X(load) X(exec) X(attach) X(kernels) X(graphs) X(canary) X(ready) X(grant)
/* X(reason): how choices end */
#define FINISH_REASONS(X) X(stop) X(length) X(abort) X(error)

struct model_metrics {
#define X(member, ...) struct histogram member;
    MODEL_HISTOGRAMS(X)
#undef X
    struct {
        struct histogram time;
    } spawn[4];                /* by SPAWN_WARMTHS */
    struct histogram phase[8]; /* by SPAWN_PHASES */
    uint64_t finished[4];      /* by FINISH_REASONS */
    uint64_t prompt_tokens, generated_tokens;
    uint64_t spawn_failures, failovers, taken_up;
};

enum metrics_bounds { BOUNDS_latency, BOUNDS_token, BOUNDS_length, BOUNDS_spawn };
void metrics_observe(struct histogram *h, enum metrics_bounds bounds, double value);
#define METRICS_OBSERVE(h, bounds, value) metrics_observe(h, BOUNDS_##bounds, value)

/* A spawn that took ms from `warmth` (enum Warmth of the API). */
void metrics_spawned(struct model_metrics *m, int warmth, double ms);
/* A phase of it. */
void metrics_phase(struct model_metrics *m, const char *name, double ms);

/* Appends everything. */
void metrics_print(struct gw *gw, struct buffer *out);

#endif
