/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The patterns of tokenizer.json are written for Oniguruma (Ruby's syntax). They are rewritten for
 * PCRE2 so that they mean the same, and compiled to machine code where PCRE2 can.
 */
#ifndef EMBER_MODEL_TOKENIZER_REGEX_H
#define EMBER_MODEL_TOKENIZER_REGEX_H

#include "base/error.h"
#include "base/mem.h"

struct regex;
struct regex_scratch; /* what one thread needs to match */

/* Appends the rewritten pattern to *out. -ENOTSUP: a construct that PCRE2 cannot express. */
int regex_translate(const char *pattern, size_t len, struct buffer *out, struct error *err);

/* Translates and compiles. -ENOTSUP as regex_translate; -EBADMSG: no pattern. */
int regex_compile(const char *pattern, size_t len, struct regex **ret_regex, struct error *err);
void regex_free(struct regex *re);
DEFINE_CLEANUP(struct regex *, regex_free)

struct regex_scratch *regex_scratch_new(void); /* NULL when memory is short */
void regex_scratch_free(struct regex_scratch *s);

/*
 * The first match at or behind `from` in valid UTF-8: 1 and its bounds, 0 for none, negative when
 * the pattern gave up on this text (-E2BIG) .
 */
int regex_find(const struct regex *re, struct regex_scratch *s, const char *text, size_t len,
               size_t from, size_t *ret_start, size_t *ret_end, struct error *err);

#endif
