/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal to cache/: the bundle, cache contents as one stream.
 *
 *   header   16 bytes: "EMBB", u16 version (1), u16 zero, u64 creation time (ns since 1970)
 *   item     24 bytes: "EMBI", u32 zero, u64 bytes of the record, u64 XXH3-64 of the record; then
 *            the record (record.h), byte for byte as in the store
 *   trailer  24 bytes: "EMBE", u32 zero, u64 number of items, u64 XXH3-64 over the items' checksums
 *            (8 bytes each, little-endian, in order)
 *
 * All integers little-endian. Nothing may follow the trailer. bundle_read takes hostile streams:
 * memory grows with the bytes that really arrive, in steps, not with what a length field claims.
 */
#ifndef EMBER_CACHE_BUNDLE_H
#define EMBER_CACHE_BUNDLE_H

#include "cache/record.h"

#define BUNDLE_VERSION 1
#define BUNDLE_ITEM 24

/*
 * Calls back with each record, fully checked. Stops at the first malformed byte (-EBADMSG), at an
 * item above max_record (-EFBIG), or with what the callback returns when that is negative.
 */
int bundle_read(int fd, uint64_t max_record,
                int (*callback)(void *ctx, const struct record *record, const void *bytes,
                                size_t len, struct error *err),
                void *ctx, struct error *err);

#endif
