/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Choosing a token from logits. Temperature, then top-k, then top-p, then min-p, each over the
 * distribution the one before left; the draw is inverse-CDF in falling order of probability with a
 * counter-based random number, so that (seed, index) fixes the token whatever else is in the batch.
 */
#ifndef EMBER_ENGINE_SAMPLE_H
#define EMBER_ENGINE_SAMPLE_H

#include <stdint.h>

#include "base/error.h"

struct sampling {
    float temperature; /* 0: greedy */
    uint32_t top_k;    /* 0: all */
    float top_p;       /* 0 or >= 1: all */
    float min_p;       /* 0: all */
    uint64_t seed, index;
};

struct token_logprob {
    uint32_t token;
    float logprob;
};

/* -EINVAL names the parameter that is out of range (negative or not a number). */
int sampling_check(const struct sampling *sampling, struct error *err);

/* One token; -ENOMEM when the candidates do not fit in memory. */
int sample_token(const struct sampling *sampling, const float *logits, uint32_t vocab,
                 uint32_t *ret_token, struct error *err);

/* log softmax of one token, accumulated in double. */
float sample_logprob(const float *logits, uint32_t vocab, uint32_t token);

/* The n best by falling probability (equal ones: lower id first) with their log-probabilities. */
void sample_top(const float *logits, uint32_t vocab, uint32_t n, struct token_logprob *ret);

#endif
