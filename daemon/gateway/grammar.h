/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured output in the gateway: from what a request asks for to a compiled grammar, made on a
 * thread of its own kind and kept for the next request that asks for the same.
 */
#ifndef EMBER_DAEMON_GATEWAY_GRAMMAR_H
#define EMBER_DAEMON_GATEWAY_GRAMMAR_H

#include <stdatomic.h>

#include "daemon/gateway/openai.h"

/* A compiled grammar. Immutable but for its count of references. */
struct compiled {
    atomic_uint refs;
    uint64_t id; /* another for each: its name in the step protocol */
    size_t len;
    uint8_t *program;
};
struct compiled *compiled_ref(struct compiled *compiled);
void compiled_unref(struct compiled *compiled); /* NULL is fine */

struct grammar_cache; /* for any thread */

/* Keeps programs of up to `limit` bytes, those that were asked for last. */
struct grammar_cache *grammar_cache_new(size_t limit);
void grammar_cache_free(struct grammar_cache *cache);

/* What the request asks for, if it has been compiled already, or NULL. The caller unrefs it. */
struct compiled *grammar_known(struct grammar_cache *cache, const struct api_request *request);
/*
 * The grammar that the request asks for (*ret NULL: it asks for none), which the caller unrefs.
 * -EINVAL and *fail.
 */
int grammar_of_request(struct grammar_cache *cache, const struct api_request *request,
                       struct compiled **ret, struct api_error *fail);

#endif
