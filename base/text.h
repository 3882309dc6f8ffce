/* SPDX-License-Identifier: Apache-2.0 */
/* Laying out the texts that tables generate: wrapped help, man(7) source. */
#ifndef EMBER_BASE_TEXT_H
#define EMBER_BASE_TEXT_H

#include "base/mem.h"

#define TEXT_WIDTH 80

/*
 * Appends `text`, wrapped at TEXT_WIDTH, each line after the first indented by `indent`; `column`
 * is where the cursor stands now. Newlines in `text` are kept. Ends with a newline.
 */
void text_wrap(struct buffer *out, size_t column, size_t indent, const char *text);

/* One row of a help list: the term at column 2, its meaning wrapped from column 28 on. */
void text_row(struct buffer *out, const char *term, const char *meaning);

/* man(7): text with everything that roff would take for a request or an escape made plain. */
void text_man(struct buffer *out, const char *text);

#endif
