/* SPDX-License-Identifier: Apache-2.0 */
/* exp over a vocabulary: a part of every draw and log-probability, so in vectors. */
#ifndef EMBER_ENGINE_WEIGH_H
#define EMBER_ENGINE_WEIGH_H

#include <stdint.h>

#define WEIGH_BLOCK 256

/* Buckets of falling weight: WEIGH_A_NAT to a factor of e; the last one takes all that is lower. */
#define WEIGH_BUCKETS 1024
#define WEIGH_A_NAT 16

/* One block; only the first n entries mean something. */
struct weighed {
    double weight[WEIGH_BLOCK]; /* never 0, never NaN: what is below 1e-307 is that much */
    int32_t bucket[WEIGH_BLOCK];
};

/*
 * weight = exp((logit - best) * scale) of n <= WEIGH_BLOCK logits, none above `best`, with a
 * relative error below 1e-15; the same bits on every processor. NaN counts as -infinity.
 */
void weigh(const float *logits, uint32_t n, double best, double scale, struct weighed *ret);

#endif
