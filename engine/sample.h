/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Choosing a token from logits. Temperature, then top-k, then top-p, then min-p, each over the
 * distribution the one before left; the draw is inverse-CDF in falling order of probability (equal
 * ones: lower id first) with a counter-based random number, so that (seed, index) fixes the token
 * whatever else is in the batch. Takes time in proportion to the vocabulary.
 */
#ifndef EMBER_ENGINE_SAMPLE_H
#define EMBER_ENGINE_SAMPLE_H

#include <stdbool.h>
#include <stddef.h>
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

/*
 * What changes logits before a token is chosen, in this order (vLLM's): biases are added,
 * suppressed tokens, those that are not allowed and those that would complete a bad run get
 * -infinity, the logits of tokens that have occurred are divided (negative ones multiplied) by the
 * repetition penalty, those of generated ones lowered by frequency times their count and by
 * presence. Where this leaves none of the allowed, the first of them is.
 */
struct logits_change {
    const uint32_t *bias_tokens; /* [n_bias], with bias_values */
    const float *bias_values;
    size_t n_bias;
    const uint32_t *suppress; /* ids beyond the vocabulary are ignored */
    size_t n_suppress;
    const uint32_t *allowed; /* nothing else is; none: everything */
    size_t n_allowed;
    const uint32_t *bad_tokens, *bad_lens; /* runs one behind the other, [n_bad] lengths */
    size_t n_bad_tokens, n_bad;
    float repetition; /* 0 or 1: none */
    float frequency, presence;
    const uint32_t *history;    /* the sequence's tokens */
    size_t n_history, n_prompt; /* the first n_prompt are the prompt's */
};

/* Whether there is anything to change. */
bool logits_change_any(const struct logits_change *change);
/* Whether it depends on the history. */
bool logits_change_history(const struct logits_change *change);
/* -EINVAL: a token beyond the vocabulary, a number that is none, runs that do not add up. */
int logits_change_check(const struct logits_change *change, uint32_t vocab, struct error *err);
/* `counts` is scratch of `vocab` zeros, and zeros again afterwards. */
void logits_change_apply(const struct logits_change *change, float *logits, uint32_t vocab,
                         uint32_t *counts);

/* -EINVAL names the parameter that is out of range (negative or not a number). */
int sampling_check(const struct sampling *sampling, struct error *err);

/* One token; -ENOMEM when the candidates do not fit in memory. */
int sample_token(const struct sampling *sampling, const float *logits, uint32_t vocab,
                 uint32_t *ret_token, struct error *err);

/* The id of the largest logit (the lowest of equal ones); NaN is less than everything. */
uint32_t logits_best(const float *logits, uint32_t vocab);

/* log of the sum of exp(logit), accumulated in double: log softmax is a logit less this. */
double logits_norm(const float *logits, uint32_t vocab);

/* The n best by falling probability (equal ones: lower id first) with their log-probabilities. */
void logits_top(const float *logits, uint32_t vocab, double norm, uint32_t n,
                struct token_logprob *ret);

#endif
