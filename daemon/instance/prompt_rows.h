/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Log-probabilities of a prompt's own tokens. The engine gives one row of logits for a sequence, so
 * a chunk whose rows are all wanted runs as sequences of one token each on the same pages, as many
 * at a time as a step takes: the same results, since they depend on no batch.
 */
#ifndef EMBER_DAEMON_INSTANCE_PROMPT_ROWS_H
#define EMBER_DAEMON_INSTANCE_PROMPT_ROWS_H

#include "ember/v1/step.pb-c.h"
#include "engine/engine.h"

struct prompt_rows; /* of one sequence in one step */

/* Room for the sequence's targets. -EINVAL: more targets than tokens, or beyond the vocabulary. */
int prompt_rows_new(struct engine *engine, const Ember__V1__SequenceStep *seq,
                    struct prompt_rows **ret, struct error *err);
void prompt_rows_free(struct prompt_rows *rows);

/* Runs all of `tokens` but the last, whose row comes with the step itself (prompt_rows_add). */
int prompt_rows_run(struct prompt_rows *rows, struct engine *engine, struct error *err);
/* Whether the row behind the last token is wanted as well. */
bool prompt_rows_wants_last(const struct prompt_rows *rows);
void prompt_rows_add_last(struct prompt_rows *rows, const float *logits);

/* The message; lives as long as `rows`. */
Ember__V1__PromptLogprobs *prompt_rows_message(struct prompt_rows *rows);

#endif
