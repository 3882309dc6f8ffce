/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured output in an instance: the grammars that the driver has defined, and for each sequence
 * under one the place where its text stands. Sampling knows a token first, since two steps are in
 * flight, so it is here that masks are applied.
 *
 * All of it belongs to one driver's connection and is bounded: bytes of programs
 * (GRAMMARS_PROGRAMS_KEPT, what Welcome says, and GRAMMARS_PROGRAMS_MAX for the sake of one step
 * that needs many), sequences (GRAMMARS_MATCHERS_MAX), and what running
 * programs has found out (GRAMMARS_KEEP, beyond which it is forgotten).
 */
#ifndef EMBER_DAEMON_INSTANCE_GRAMMARS_H
#define EMBER_DAEMON_INSTANCE_GRAMMARS_H

#include "cache/cache.h"
#include "ember/v1/step.pb-c.h"
#include "model/grammar/grammar.h"

#define GRAMMARS_PROGRAMS_KEPT (64u << 20)
#define GRAMMARS_PROGRAMS_MAX (1u << 30)
#define GRAMMARS_MATCHERS_MAX 8192
#define GRAMMARS_KEEP (192u << 20)

struct grammars;

/*
 * For a model with so many logits, whose tokenizer is in `dir`. `cache` may be NULL; both outlive
 * it. The tokens' bytes are read by a thread that the first definition starts.
 */
struct grammars *grammars_new(struct cache *cache, const char *dir, uint32_t vocab);
void grammars_free(struct grammars *grammars);
/* Another driver: everything that the last one said is forgotten. */
void grammars_reset(struct grammars *grammars);

/* A Grammar message. -EBADMSG: no program; -E2BIG: too many, or too large ones; -ENOMEM. */
int grammars_define(struct grammars *grammars, const Ember__V1__Grammar *message,
                    struct error *err);
/* Sequences that will not come again; unknown ones are ignored. */
void grammars_end(struct grammars *grammars, const uint64_t *ids, size_t n);

/*
 * Where the sequence's text stands, before its next token; made anew from `generated` when the
 * sequence is not known. -EINVAL: its grammar is not defined, or its tokens do not keep to it, or
 * they are not as many as sample_index says.
 */
int grammars_find(struct grammars *grammars, const Ember__V1__SequenceStep *seq,
                  struct matcher **ret, struct error *err);
/* Changes a row of logits so that only what may follow is left; at least one token is. -ENOMEM. */
int grammars_restrict(struct grammars *grammars, struct matcher *matcher,
                      const Ember__V1__SequenceStep *seq, float *logits, struct error *err);
/* The token that was chosen under the restriction. *ret_ended: nothing may follow. */
void grammars_take(struct grammars *grammars, struct matcher *matcher,
                   const Ember__V1__SequenceStep *seq, uint32_t token, bool *ret_ended);
/* After a step: keeps within GRAMMARS_KEEP. */
void grammars_tidy(struct grammars *grammars);

#endif
