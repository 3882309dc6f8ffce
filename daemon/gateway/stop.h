/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stop strings in streamed text: what could be the beginning of one is held back, so that no part
 * of a stop string ever leaves. The earliest end wins, as if the text had come byte by byte; of
 * several that end there, the one that begins first.
 */
#ifndef EMBER_DAEMON_GATEWAY_STOP_H
#define EMBER_DAEMON_GATEWAY_STOP_H

#include <stdbool.h>

#include "base/mem.h"

struct stop_set {
    const char *const *strings; /* borrowed, none empty */
    const size_t *lens;
    size_t n;
};

/* Zero-initialise; stop_free is idempotent. */
struct stop {
    struct buffer held;
};

void stop_free(struct stop *stop);
/*
 * Takes more text; appends to *out what is certain not to belong to a stop string. True: a stop
 * string has come, *ret_which; with `include` it has been appended as well. Nothing may follow
 * then.
 */
bool stop_push(struct stop *stop, const struct stop_set *set, const char *text, size_t len,
               bool include, struct buffer *out, size_t *ret_which);
/* The end of the text: appends what was held back. */
void stop_finish(struct stop *stop, struct buffer *out);

#endif
