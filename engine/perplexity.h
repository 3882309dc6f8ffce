/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Perplexity: how surprised a model is by a text, the exponential of the mean negative logarithm of
 * the probability that it gives to each token after those before it. A small measure of what a
 * change of the weights or of the KV cache costs, and the same steps as in serving.
 */
#ifndef EMBER_ENGINE_PERPLEXITY_H
#define EMBER_ENGINE_PERPLEXITY_H

#include "engine/engine.h"

#define PERPLEXITY_STEP 64 /* tokens of a step: tap_tokens of the engine's options */

/* Sums, so that documents can be added up. */
struct perplexity {
    uint64_t tokens; /* that were predicted: all but the first of each window */
    double loss;     /* the sum of -ln p */
};
/* e to the mean; 0 of nothing. */
double perplexity_value(const struct perplexity *p);

struct perplexity_options {
    uint32_t window; /* tokens that are predicted from one another; 0: 512; fewer where the model or
                        the engine's KV has not so many positions */
    /* Called behind each step; non-zero cancels. May be NULL. */
    int (*progress)(void *ctx, uint32_t tokens);
    void *ctx;
};

/*
 * Adds n ids, in windows one behind the other; fewer than two add nothing. `engine` has a tap
 * bucket of PERPLEXITY_STEP tokens and no sequences of its own: all its KV pages are used. -EINVAL:
 * an id beyond the vocabulary; -ECANCELED; the errors of engine_step.
 */
int perplexity_add(struct engine *engine, const uint32_t *ids, size_t n,
                   const struct perplexity_options *options, struct perplexity *sum,
                   struct error *err);

#endif
