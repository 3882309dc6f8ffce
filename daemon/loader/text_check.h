/* SPDX-License-Identifier: Apache-2.0 */
/* Whether the text side of a model, which its weights do without, can be used. */
#ifndef EMBER_DAEMON_LOADER_TEXT_CHECK_H
#define EMBER_DAEMON_LOADER_TEXT_CHECK_H

#include "base/mem.h"

/*
 * Reads tokenizer and chat template of the checkpoint, or of the pack, in `path` as their users do.
 * Appends to *out, for each that is there and broken, which file, why, and what will not work;
 * files that are not there are no defect. Takes as long as parsing them: tenths of a second for
 * 150,000 tokens.
 */
void text_check(const char *path, struct buffer *out);

#endif
