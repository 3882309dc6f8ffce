/* SPDX-License-Identifier: Apache-2.0 */
/* Writing JSON into a buffer. A failed allocation ends the process: nothing can be answered then.
 */
#ifndef EMBER_DAEMON_GATEWAY_JSON_H
#define EMBER_DAEMON_GATEWAY_JSON_H

#include "base/mem.h"

/* Appends text as it is. */
void js_raw(struct buffer *out, const char *text);
void js_printf(struct buffer *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A string with its quotes; what is not UTF-8 becomes U+FFFD, byte by byte. NULL: null. */
void js_string(struct buffer *out, const char *text, size_t len);
void js_cstring(struct buffer *out, const char *text);
/* A finite number in the fewest digits that read back as the same float; others as null. */
void js_float(struct buffer *out, float value);
void js_bool(struct buffer *out, bool value);

#endif
