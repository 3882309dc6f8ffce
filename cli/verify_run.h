/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verification: a checkpoint against numbers that another implementation computed from it.
 *
 * Two forms of reference folder: config.json, model.safetensors, case.json and expected.safetensors
 * (logits of every prompt position, hidden states of every layer, greedy continuation), and a
 * checkpoint with a tokenizer and expected_text.json (prompts, their ids, greedy ids and text, best
 * first tokens).
 */
#ifndef EMBER_CLI_VERIFY_RUN_H
#define EMBER_CLI_VERIFY_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "model/model.h"
#include "cache/cache.h"

#define VERIFY_LAYERS_MAX 512

struct verify_options {
    const char *backend, *isa;
    uint32_t threads;
    enum kv_kind kv;
    bool compile;
    struct cache *cache; /* may be NULL */
    double tolerance;    /* of logits: worst absolute error over the largest expected logit */
};

struct verify_result {
    char kind[8]; /* "golden" or "text" */
    bool passed;
    uint32_t tokens, cases, cases_passed;
    double logits_error,
        cosine; /* golden; text: worst difference of a best token's log-probability */
    uint32_t n_hidden;
    /* Hidden.i: worst absolute error over the largest value. */
    double hidden_error[VERIFY_LAYERS_MAX];
    int first_bad_hidden; /* -1: none */
    uint32_t greedy,
        greedy_equal; /* tokens that were to come, and how many came before a difference */
    uint32_t greedy_want, greedy_got; /* the first that differs */
    char detail[ERROR_TEXT_MAX];      /* of the first failure */
};

/* 0 with *ret filled, whether it passed or not; negative when the folder cannot be run at all. */
int verify_folder(const char *dir, const struct verify_options *options, struct verify_result *ret,
                  struct error *err);

#endif
