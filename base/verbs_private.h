/* SPDX-License-Identifier: Apache-2.0 */
/* What verbs.c and verbs_text.c share. */
#ifndef EMBER_BASE_VERBS_PRIVATE_H
#define EMBER_BASE_VERBS_PRIVATE_H

#include "base/verbs.h"

const struct verb *verb_find(const struct verb_program *program, const char *name);
/* "cache" is the group of "cache ls"; *ret_rest (may be NULL) is then "ls". */
bool verb_in_group(const char *verb, const char *group, const char **ret_rest);
bool verb_is_group(const struct verb_program *program, const char *word);

/* The next word of an args text such as "DIR [NAME...]"; false at its end. */
bool verb_args_next(const char **text, char *word, size_t room, bool *ret_optional, bool *ret_many);

void verb_group_help(const struct verb_program *program, const char *group, struct buffer *out);

#endif
