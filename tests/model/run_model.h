/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs a checkpoint through the reference ops: small models only. One sequence, KV pages in an
 * order that is not the identity.
 */
#ifndef EMBER_TESTS_RUN_MODEL_H
#define EMBER_TESTS_RUN_MODEL_H

#include "model/model.h"

struct run_model {
    struct checkpoint *checkpoint;
    struct model *model;
    struct weights_layout *layout;
    struct plan *plan;
    uint32_t plan_tokens;
    uint8_t *weights, *kv, *scratch, *io;
    uint32_t n_pages;
};

int run_model_open(const char *dir, uint32_t max_tokens, struct run_model *ret, struct error *err);
void run_model_close(struct run_model *run);

/*
 * One step of n tokens of which the first has position `first`, through a plan for a bucket of
 * `bucket` tokens; logits of every token. They stay in run->io until the next step.
 */
int run_model_step(struct run_model *run, uint32_t bucket, const int32_t *tokens, uint32_t n,
                   uint32_t first, uint32_t prompt_len, bool taps, struct error *err);
const float *run_model_logits(const struct run_model *run, uint32_t row);
const float *run_model_hidden(const struct run_model *run, uint32_t layer, uint32_t row);
int32_t run_model_sampled(const struct run_model *run, uint32_t row);

#endif
