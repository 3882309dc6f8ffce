/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model in this process for measuring steps: loaded, all buckets ready, KV pages written, and
 * what a step of it costs at least.
 */
#ifndef EMBER_CLI_BENCH_MODEL_H
#define EMBER_CLI_BENCH_MODEL_H

#include "base/error.h"
#include "base/verbs.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "model/model.h"

struct bench_model {
    char *dir;
    enum kv_kind kv;
    struct loaded loaded;
    struct model *model;
    struct weights_layout *layout;
    struct engine *engine;
    uint32_t *pages; /* 0, 1, 2, ... */
    uint32_t n_pages;
};

/*
 * The folder of `name`: of a shape (cli/shapes.h) a checkpoint with random weights, written first
 * under --dir unless it is there already and cut to `layers` (0: all); "tiny" is the embedded
 * model; else a folder. -ENOENT.
 */
int bench_model_find(const struct verb_call *call, const char *name, uint32_t layers,
                     char **ret_dir, struct error *err);

/* Loads model->dir as --quant says and opens an engine with --threads and --isa that holds `tokens`
 * of KV. */
int bench_model_open(struct bench_model *model, const struct verb_call *call, uint32_t tokens,
                     struct error *err);
void bench_model_free(struct bench_model *model);

/* Some of the tokens of a step: n sequences of `tokens` each, behind `position` others. */
struct bench_load {
    uint32_t seqs, tokens, position;
};

/* What a step must read and do at least: each weight once, each visible key and value once for each
 * sequence; multiply-adds counted twice. Experts: as many as random routing hits. */
struct step_cost {
    double weight_bytes, kv_bytes, flops;
};
int bench_model_cost(const struct bench_model *model, const struct bench_load *load,
                     struct step_cost *ret, struct error *err);

/* Medians over steps of one load. */
struct step_times {
    uint32_t steps;
    double ms;          /* a step, without times being kept */
    double overhead_ms; /* a step less its kernels; NAN: the backend keeps no times */
    uint32_t n_rows;
    struct engine_profile_row rows[ENGINE_PROFILE_MAX];
    double profiled_ms; /* of the steps that the rows are of, all together */
    uint32_t profiled;
};
int bench_model_run(struct bench_model *model, const struct bench_load *load, double seconds,
                    struct step_times *ret, struct error *err);
/* Milliseconds a step in kernels whose name begins so; 0 when there are no times. */
double step_times_of(const struct step_times *times, const char *kernel);

#endif
