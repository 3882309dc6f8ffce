/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Text that came from outside: a file's name or content, a client's string, a child's last line.
 * What goes on into a message must be UTF-8 (a protobuf reader may refuse the whole message for one
 * bad string), and what goes to a terminal must not command it.
 */
#ifndef EMBER_BASE_UTF8_H
#define EMBER_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>

#include "base/mem.h"

/* Bytes of the well-formed character at text[0..len) (Unicode 15, table 3-7), 0: there is none. */
size_t utf8_char(const char *text, size_t len);

/* The NUL-terminated text is well-formed UTF-8. */
bool utf8_valid(const char *text);

/*
 * Makes a NUL-terminated text fit for messages and terminals, in place and never longer: bytes that
 * are not UTF-8 and control characters but newline and tab become '?', a character that is cut
 * short at the end goes.
 */
void utf8_tame(char *text);

/* The same for a text that stands within a line: newlines and tabs become '?' as well. */
void utf8_tame_line(char *text);

/* Appends what stands within 24 bytes on each side of text[at], in quotes: whole characters, those
 * that control escaped, dots where it was cut. */
void utf8_excerpt(struct buffer *out, const char *text, size_t len, size_t at);

#endif
