/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal to cache/: the record, what is stored under a key. Pure code, no I/O; record_parse takes
 * hostile bytes. All integers little-endian, no alignment assumed.
 *
 *   offset size
 *     0     4   magic "EMBC"
 *     4     2   record version (RECORD_VERSION)
 *     6     2   kind
 *     8     4   payload offset: a multiple of 16, zero bytes between the factors' end and it
 *    12     4   bytes of the factor list
 *    16     8   bytes of the payload
 *    24     8   XXH3-64 of the payload
 *    32     8   creation time, ns since 1970
 *    40    16   key: XXH3-128 over "EMBK", u16 version, u16 kind, factor list
 *    56     2   bytes of the subject
 *    58     2   number of factors
 *    60     4   zero
 *    64     8   XXH3-64 over bytes 0..63, the subject and the factor list, in one run
 *    72         subject, factor list, zeros, payload
 *
 * A factor: u16 bytes of the name, u16 form (0: value inline, 1: its XXH3-128), u64 bytes of the
 * value, then the name, then the value (at most 64 bytes) or the 16-byte digest.
 */
#ifndef EMBER_CACHE_RECORD_H
#define EMBER_CACHE_RECORD_H

#include "cache/cache.h"

#define RECORD_VERSION 1
#define RECORD_HEAD 72
#define RECORD_ALIGN 16
#define FACTOR_HEAD 12
#define FACTORS_BYTES_MAX (CACHE_FACTORS_MAX * (FACTOR_HEAD + CACHE_NAME_MAX + CACHE_INLINE_MAX))

struct cache_key {
    unsigned kind;
    const char *broken; /* the limit that was exceeded, or NULL */
    unsigned n_factors;
    struct buffer factors;
    struct digest digest; /* kept current by cache_key_add */
    char subject[CACHE_SUBJECT_MAX + 1];
};

/* A parsed record; the pointers lie in the parsed bytes. */
struct record {
    unsigned kind, n_factors;
    uint64_t created_ns;
    struct digest key;
    const char *subject; /* not terminated */
    size_t subject_len;
    const void *factors;
    size_t factors_len;
    const void *payload;
    size_t payload_len;
    uint64_t checksum;
};

/* Everything but the payload's bytes is checked. -EBADMSG with a text. */
int record_parse(const void *bytes, size_t len, struct record *ret, struct error *err);
/* The payload's checksum. */
int record_check_payload(const struct record *record, struct error *err);

/* The bytes before the payload. 0, -EINVAL (broken key) or -ENOMEM. */
int record_head(const struct cache_key *key, const void *payload, size_t len, uint64_t created_ns,
                struct buffer *out, struct error *err);

/* "kernel 'gemm'" into buf; returns buf. */
#define RECORD_LABEL_MAX (CACHE_SUBJECT_MAX + 32)
char *record_label(unsigned kind, const char *subject, size_t subject_len,
                   char buf[RECORD_LABEL_MAX]);

static inline uint64_t get_le(const void *p, size_t n)
{
    uint64_t v = 0;
    for (size_t i = n; i-- > 0;)
        v = v << 8 | ((const uint8_t *)p)[i];
    return v;
}

static inline void put_le(void *p, size_t n, uint64_t v)
{
    for (size_t i = 0; i < n; i++, v >>= 8)
        ((uint8_t *)p)[i] = (uint8_t)v;
}

#endif
