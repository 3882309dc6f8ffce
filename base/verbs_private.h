/* SPDX-License-Identifier: Apache-2.0 */
/* What verbs.c and verbs_text.c share. */
#ifndef EMBER_BASE_VERBS_PRIVATE_H
#define EMBER_BASE_VERBS_PRIVATE_H

#include "base/verbs.h"

/* "cache" is the group of "cache ls"; *ret_rest (may be NULL) is then "ls". */
bool verb_in_group(const char *verb, const char *group, const char **ret_rest);

void verb_group_help(const struct verb_program *program, const char *group, struct buffer *out);

#endif
