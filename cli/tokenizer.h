/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers for verbs that only use one. */
#ifndef EMBER_CLI_TOKENIZER_H
#define EMBER_CLI_TOKENIZER_H

#include "model/tokenizer/tokenizer.h"

/* As engine_tokenizer_open, through emberd's default cache where there is one that we may read. */
int cli_tokenizer(const char *path, struct tokenizer **ret, struct error *err);

#endif
