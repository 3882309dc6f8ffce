/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Internal to cache/: records in LMDB. Only store.c and store_data.c touch LMDB; store.c's header
 * tells the databases and how they are read and written.
 */
#ifndef EMBER_CACHE_STORE_H
#define EMBER_CACHE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

struct store;
struct store_read;

#define STORE_VERSION 1
#define STORE_FILE "store.mdb"
#define STORE_ABSENT 1

struct store_options {
    uint64_t limit, initial;
    bool read_only;
    int lock_fd; /* lockfile, or -1 */
};

struct store_entry {
    struct digest key;
    unsigned kind;
    uint64_t subject; /* XXH3-64 of the subject */
    uint64_t last_use_ns, size;
};

struct store_info {
    uint64_t entries, live_bytes, map_bytes, file_bytes, quarantined, quarantined_bytes;
    uint64_t grown, evicted; /* by this process */
};

/* *ret_aside: set when an old or damaged store was moved aside (a static text why), else NULL. */
int store_open(const char *dir, const struct store_options *options, struct store **ret,
               const char **ret_aside, struct error *err);
void store_close(struct store *s);
/* Renames the store's file in dir to store.mdb.old. 0 also when there is none. Hold the open lock.
 */
int store_set_aside(const char *dir, struct error *err);

/* A read transaction: a snapshot. Pointers into it live until store_read_end. */
int store_read_begin(struct store *s, struct store_read **ret, struct error *err);
void store_read_end(struct store_read *read);
DEFINE_CLEANUP(struct store_read *, store_read_end)
/* 0, STORE_ABSENT or -errno; ret_entry may be NULL. */
int store_read_record(struct store_read *read, const struct digest *key, const void **ret_bytes,
                      size_t *ret_len, struct store_entry *ret_entry, struct error *err);

/* Callbacks return 0 to go on; anything else ends the scan and is returned. */
typedef int store_scan_fn(void *ctx, const struct store_entry *entry, const void *bytes,
                          size_t len);
int store_scan(struct store_read *read, store_scan_fn *callback, void *ctx, struct error *err);
int store_scan_subject(struct store_read *read, unsigned kind, uint64_t subject,
                       store_scan_fn *callback, void *ctx, struct error *err);
int store_scan_quarantine(struct store_read *read,
                          int (*callback)(void *ctx, const struct store_entry *entry,
                                          const char *reason, const void *bytes, size_t len),
                          void *ctx, struct error *err);

/* Writes; each one transaction. The record is head followed by payload. */
int store_put(struct store *s, const struct store_entry *entry, const void *head, size_t head_len,
              const void *payload, size_t payload_len, struct error *err);
/* STORE_ABSENT when it is not there. */
int store_delete(struct store *s, const struct digest *key, struct error *err);
/*
 * Moves the record of key to quarantine if still_bad says so of the bytes that are there now
 * (another process may have replaced them meanwhile: STORE_ABSENT then).
 */
int store_quarantine(struct store *s, const struct digest *key, const char *reason,
                     bool (*still_bad)(const struct digest *key, const void *bytes, size_t len),
                     struct error *err);
/* Notes the last use of n keys. */
int store_touch(struct store *s, const struct digest *keys, size_t n, uint64_t now_ns,
                struct error *err);
/*
 * Removes entries not used since older_than_ns (0: none for age), then the oldest until at most
 * max_bytes remain. With drop_quarantine that is emptied too.
 */
int store_trim(struct store *s, uint64_t max_bytes, uint64_t older_than_ns, bool drop_quarantine,
               uint64_t *ret_removed, uint64_t *ret_bytes, struct error *err);
int store_info(struct store *s, struct store_info *ret, struct error *err);

#endif
