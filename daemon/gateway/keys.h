/* SPDX-License-Identifier: Apache-2.0 */
/* API keys: a file with one a line; what stands behind a blank, and lines with # first, are notes.
 */
#ifndef EMBER_DAEMON_GATEWAY_KEYS_H
#define EMBER_DAEMON_GATEWAY_KEYS_H

#include <stddef.h>

#include "base/error.h"

struct keys;

/* -EINVAL when there is no key in it. */
int keys_read(const char *path, struct keys **ret, struct error *err);
void keys_free(struct keys *keys);

/*
 * Which key an Authorization header ("Bearer KEY", or NULL) shows: its number from 1 on, 0: none of
 * ours. Takes a time that depends on lengths and the number of keys alone.
 */
size_t keys_find(const struct keys *keys, const char *header);

#endif
