/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 128-bit content digests (XXH3, the xxHash specification): cache keys, checksums of stored values,
 * weights and canary outputs. They guard against damage and mix-ups, not against an adversary who
 * may write into the cache: that one owns the daemon's files anyway.
 */
#ifndef EMBER_BASE_DIGEST_H
#define EMBER_BASE_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DIGEST_HEX_SIZE 33

struct digest {
    uint8_t bytes[16]; /* canonical (big-endian) form of XXH3_128bits */
};

/* The digest of len bytes. */
struct digest digest_of(const void *data, size_t len);
/* The checksum of stored values: XXH3_64bits. */
uint64_t checksum_of(const void *data, size_t len);

/* Incremental form. digest_begin never fails on a Linux host that can allocate 600 bytes (aborts).
 */
struct digest_state;
struct digest_state *digest_begin(void);
void digest_update(struct digest_state *state, const void *data, size_t len);
/* A string with its length in front, so that ("ab","c") and ("a","bc") differ. NULL counts as "".
 */
void digest_update_string(struct digest_state *state, const char *s);
struct digest digest_end(struct digest_state *state); /* frees the state */

static inline bool digest_equal(const struct digest *a, const struct digest *b)
{
    return !memcmp(a, b, sizeof *a);
}
/* Writes 32 hex digits and a NUL; returns hex. */
char *digest_hex(const struct digest *d, char hex[DIGEST_HEX_SIZE]);

#endif
