/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured output: what a JSON Schema, a regular expression, a grammar or a list of choices
 * allows, as a program over bytes, and the tokens of a vocabulary that may follow at each place of
 * a text.
 *
 *     text ──grammar_from_*──▶ program bytes ──grammar_open──▶ struct grammar ──▶ struct matcher
 *                                                                  ▲
 *     tokenizer ──vocab_new──▶ struct vocab ──────────────────────┘
 *
 * Program bytes hold no address, are the same wherever they are made, and are checked in full when
 * they are opened, so that they may come from anybody. A program is a pushdown automaton: each rule
 * of the grammar that is not copied into its users is a deterministic machine over bytes and over
 * calls of other rules; a repetition with a large count is a call with a counter.
 *
 * Whatever a mask allows can be finished: every state of a program leads to an end. A text of which
 * the mask allowed every token and whose end it allowed belongs to the language.
 *
 * A grammar and its matchers belong to one thread; a vocabulary may serve many.
 */
#ifndef EMBER_MODEL_GRAMMAR_GRAMMAR_H
#define EMBER_MODEL_GRAMMAR_GRAMMAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "base/mem.h"
#include "model/tokenizer/tokenizer.h"

struct json_t;

/* ---- making programs ---- */

#define GRAMMAR_SOURCE_MAX (1u << 20)  /* bytes of a schema, pattern or grammar */
#define GRAMMAR_PROGRAM_MAX (4u << 20) /* bytes of a program */

struct grammar_json_options {
    /* A pattern for the white space between JSON's tokens; NULL: nothing, a space, or a newline and
     * up to 20 spaces or tabs. */
    const char *whitespace;
    bool compact; /* "," and ":" are followed by one space, and there is no other white space */
    /* A text that begins with this instead may go on as it likes; NULL: none may. */
    const char *or_begins;
};

/*
 * Programs are appended to *out; options may be NULL. -EINVAL: the text is wrong; -ENOTSUP:
 * understood and not supported, naming what and where; -E2BIG: the program would be too large, or
 * took too long; in all cases the error's text is for the client. -EINVAL as well when no text at
 * all satisfies it.
 */

/*
 * A JSON Schema (draft 2020-12 and its predecessors; see docs/gateway.md for keywords). What is
 * made is valid under it, but not all that is valid is made: properties come in the schema's order;
 * objects with `properties` get others only if additionalProperties asks for them.
 */
int grammar_from_schema(const struct json_t *schema, const struct grammar_json_options *options,
                        struct buffer *out, struct error *err);
/* Any JSON object. */
int grammar_from_json_object(const struct grammar_json_options *options, struct buffer *out,
                             struct error *err);
/* A regular expression that the whole text matches (no look-around, no back references). */
int grammar_from_regex(const char *pattern, size_t len, struct buffer *out, struct error *err);
/* One of some texts. */
int grammar_from_choice(const char *const *choices, const size_t *lens, size_t n,
                        struct buffer *out, struct error *err);
/*
 * Rules: `name ::= ...` from the rule `root` on (GBNF, the EBNF of xgrammar), or else Lark's `name:
 * ...` from `start` on.
 */
int grammar_from_rules(const char *text, size_t len, struct buffer *out, struct error *err);

/* ---- vocabularies ---- */

struct vocab;

/*
 * The bytes of all tokens but special ones, with ids below `size` (the model's logits), as a trie.
 * Tokens longer than 255 bytes are left out. Takes some 75 ms and 12 MB for 150,000 tokens. The
 * tokenizer is not needed afterwards.
 */
int vocab_new(const struct tokenizer *tokenizer, uint32_t size, struct vocab **ret,
              struct error *err);
/* The same from bytes: token i is bytes[first[i] .. first[i + 1]); empty ones are left out. */
int vocab_from_bytes(const uint8_t *bytes, const uint32_t *first, uint32_t size, struct vocab **ret,
                     struct error *err);
void vocab_free(struct vocab *vocab);
DEFINE_CLEANUP(struct vocab *, vocab_free)
uint32_t vocab_size(const struct vocab *vocab);
/* A token's bytes; none for those that were left out. */
const uint8_t *vocab_token(const struct vocab *vocab, uint32_t token, size_t *ret_len);

/* ---- running programs ---- */

struct grammar;
struct matcher;

/*
 * Opens program bytes, which are copied and may be hostile. The vocabulary must outlive the
 * grammar; NULL: it comes later. -EBADMSG: they are no program; -ENOMEM. The caller owns one
 * reference.
 */
int grammar_open(const void *program, size_t len, const struct vocab *vocab, struct grammar **ret,
                 struct error *err);
/* The vocabulary of a grammar opened without one, before its first matcher; the same each time. */
void grammar_use_vocab(struct grammar *grammar, const struct vocab *vocab);
/* Its matchers keep it, too. NULL is fine. */
void grammar_unref(struct grammar *grammar);
DEFINE_CLEANUP(struct grammar *, grammar_unref)

/*
 * Bytes it holds: the program, and what was found out while running it (states, masks), which is
 * kept for the next and forgotten beyond `GRAMMAR_KEEP`.
 */
#define GRAMMAR_KEEP (24u << 20)
size_t grammar_memory(const struct grammar *grammar);
/* Forgets all that matchers do not need. */
void grammar_trim(struct grammar *grammar);

/* At the beginning of a text; holds a reference. -ENOMEM. */
int matcher_new(struct grammar *grammar, struct matcher **ret, struct error *err);
void matcher_free(struct matcher *matcher); /* NULL is fine */
DEFINE_CLEANUP(struct matcher *, matcher_free)

/*
 * The tokens that may follow: bit (token & 63) of word token / 64, vocab_size bits in whole words;
 * valid until the next call for the same grammar. NULL when memory is short. Ends are not among
 * them: see matcher_may_end.
 */
const uint64_t *matcher_mask(struct matcher *matcher);
/* Takes a token: false, and nothing has changed, when it may not follow or memory is short. */
bool matcher_take(struct matcher *matcher, uint32_t token);
/* The same for bytes. */
bool matcher_take_bytes(struct matcher *matcher, const void *bytes, size_t n);
bool matcher_may_end(const struct matcher *matcher);
/* Nothing may follow. */
bool matcher_must_end(const struct matcher *matcher);

#endif
