/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A generation: one sequence driven on a leased instance, token by token. If the instance dies in
 * mid-stream, the sequence is replayed on another from the tokens held here, and goes on as if
 * nothing had happened.
 */
#ifndef EMBER_CLI_GENERATION_H
#define EMBER_CLI_GENERATION_H

#include <stdbool.h>
#include <stdint.h>

#include "cli/control.h"
#include "cli/step_client.h"

#define GENERATION_DEATHS_MAX 2 /* in a row: then the request itself is suspect */

struct generation_options {
    const char *model;
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed;
    uint32_t max_tokens;
    bool ignore_eos;
};

struct generation {
    struct control *control;
    struct generation_options options;
    Ember__V1__SpawnInstanceResponse *spawned;
    struct step_client *client;
    uint32_t *tokens; /* prompt and what came */
    uint32_t n_prompt, n_tokens, capacity;
    uint32_t deaths, replays;
    double spawn_ms,
        first_token_ms; /* from the start of the generation; spawn_ms from the RPC's start */
    uint64_t started_ns;
};

/* Leases an instance; the tokenizer's folder and limits are then in step_client_welcome(g->client).
 */
int generation_begin(struct generation *g, struct control *control,
                     const struct generation_options *options, struct error *err);
/* Sets the prompt; -EINVAL when it is empty or longer than the model takes. */
int generation_prompt(struct generation *g, const uint32_t *ids, size_t n, struct error *err);
/* The next token. 1: the end (end of text, max_tokens or no more positions). */
int generation_next(struct generation *g, uint32_t *ret_token, struct error *err);
/* Ends the lease: the instance goes back to the pool (keep_warm) or is stopped. Idempotent. */
void generation_end(struct generation *g, bool keep_warm);

#endif
