/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The artefact cache: compiled kernels, captured graphs and small records in one LMDB environment
 * that all processes of a host share. docs/cache-format.md has the bytes on disk.
 *
 * What a caller may rely on:
 *   - a value that comes back is the value that was stored under exactly these factors (magic,
 *     version, lengths and an XXH3 checksum are checked at each read);
 *   - damage of any kind is a miss: the entry goes to quarantine and may be built again once;
 *   - a failed build is never stored; a full disk or map costs the storing, never the value;
 *   - one builder per key on the whole host (cache_get_or_build), and no lock outlives its process.
 *
 * Rules, from LMDB's caveats:
 *   - one struct cache per directory and process (cache_open refuses a second: -EBUSY);
 *   - it does not survive fork(): calls in the child fail with -ECHILD, cache_close only frees;
 *   - a struct cache_read is short-lived: while one is open the map cannot grow in this process and
 *     no process can reuse the pages that were freed meanwhile. It belongs to one thread at a time;
 *   - all other functions may be called from any thread.
 * A positive return of a lookup means a miss, see enum cache_result.
 */
#ifndef EMBER_CACHE_CACHE_H
#define EMBER_CACHE_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/digest.h"
#include "base/error.h"
#include "base/mem.h"

struct cache;
struct cache_key;
struct cache_read;

/* id, number on disk (never reused), name in texts and in emberctl */
#define CACHE_KINDS(X)                                                                             \
    X(CACHE_KERNEL, 1, "kernel")       /* a compiled kernel: blob and entry names */               \
    X(CACHE_GRAPH, 2, "graph")         /* a captured graph: a relocatable launch list */           \
    X(CACHE_CANARY, 3, "canary")       /* digest of a canary's output at capture */                \
    X(CACHE_TOKENIZER, 4, "tokenizer") /* a tokenizer's prepared tables */                         \
    X(CACHE_RECORD, 5, "record")       /* small things: measured sizes, probe results */

enum cache_kind {
#define X(id, number, name) id = number,
    CACHE_KINDS(X)
#undef X
};
/* NULL for a number that this build does not know. */
const char *cache_kind_name(unsigned kind);

/* Positive results; 0 is success (found), negative an errno. */
enum cache_result {
    CACHE_MISS = 1,         /* nothing stored under this key */
    CACHE_MISS_DAMAGED = 2, /* what was stored is damaged and now in quarantine; err says how */
    CACHE_MISS_DAMAGED_AGAIN =
        3,             /* as above, for the second time in this process: suspect the disk */
    CACHE_BUILT = 4,   /* get_or_build: built here and stored */
    CACHE_UNSTORED = 5 /* get_or_build: built here, not stored; err says why */
};

/* ---- Opening ---- */

struct cache_options {
    uint64_t limit;   /* bytes the map may grow to; 0: 1 GiB. Oldest entries leave at 7/8 of it */
    uint64_t initial; /* bytes mapped at first; 0: 64 MiB. Doubles when full */
    bool read_only;   /* never creates, stores, evicts or quarantines anything */
    /* Last use is noted when the note is older than this; 0: an hour, < 0: always. */
    int64_t use_ms;
};

enum cache_warning {
    CACHE_WARN_NETWORK = 1, /* NFS, CIFS, FUSE, Lustre, ...: LMDB is not safe between hosts there */
    CACHE_WARN_ASIDE = 2    /* the store of an older format, or a damaged one, was moved aside */
};

/*
 * Opens the cache in directory dir, creating it (mode 0700, parents too) unless read_only.
 * options may be NULL. Costs well under a millisecond on a directory that exists.
 * Errors: -EBUSY (open in this process already), -EPERM (others may write into dir),
 * -ESTALE (written by a newer format), -ENOENT (read_only and nothing there), or the system's.
 * A store of an older format or with damaged structure is renamed to store.mdb.old and a new one
 * begun; cache_warnings() tells.
 */
int cache_open(const char *dir, const struct cache_options *options, struct cache **ret,
               struct error *err);
void cache_close(struct cache *cache);
DEFINE_CLEANUP(struct cache *, cache_close)

/* Bits of enum cache_warning; *ret_text (may be NULL) gets a text that lives as long as the cache.
 */
unsigned cache_warnings(const struct cache *cache, const char **ret_text);

/*
 * Moves the store in dir aside without opening it, for a manager whose children crash at start with
 * this cache (damage that LMDB itself does not survive). Processes that have it open keep the old.
 */
int cache_set_aside(const char *dir, struct error *err);

/* ---- Keys ---- */

#define CACHE_FACTORS_MAX 64
#define CACHE_NAME_MAX 64     /* bytes of a factor's name */
#define CACHE_SUBJECT_MAX 200 /* bytes of a subject */
#define CACHE_INLINE_MAX 64   /* longer factor values are kept as their digest */

/*
 * A key is a list of named factors: everything that the artefact depends on and nothing else (no
 * paths, no times). Two keys are equal when kind, names, values and order are. The subject
 * ("gemm_q8", "qwen3-4b decode b8") is a label for people and for cache_explain_miss; it is NOT
 * part of the key. Never fails; a key that breaks a limit above is refused by the functions that
 * use it (-EINVAL).
 */
struct cache_key *cache_key_begin(enum cache_kind kind, const char *subject);
void cache_key_add(struct cache_key *key, const char *name, const void *value, size_t len);
void cache_key_add_string(struct cache_key *key, const char *name, const char *value);
void cache_key_add_u64(struct cache_key *key, const char *name,
                       uint64_t value); /* as decimal text */
void cache_key_free(struct cache_key *key);
DEFINE_CLEANUP(struct cache_key *, cache_key_free)
struct digest cache_key_digest(const struct cache_key *key);

/* ---- Values ---- */

struct cache_value {
    void *data; /* aligned to 16 bytes; free with cache_value_free */
    size_t len;
};
void cache_value_free(struct cache_value *value); /* idempotent; also a cleanup function */
#define _cleanup_cache_value_ _cleanup_(cache_value_free)

/* A private copy of the value. 0, a miss (> 0), or a negative errno (treat as a miss, go on). */
int cache_get(struct cache *cache, const struct cache_key *key, struct cache_value *ret_value,
              struct error *err);

/*
 * The same without a copy: *ret_data, aligned to 16 bytes, points into the map and is valid until
 * cache_read_end. (Values below about 2 KiB are copied into memory of the struct cache_read.)
 */
int cache_read_begin(struct cache *cache, struct cache_read **ret, struct error *err);
int cache_read_get(struct cache_read *read, const struct cache_key *key, const void **ret_data,
                   size_t *ret_len, struct error *err);
void cache_read_end(struct cache_read *read);
DEFINE_CLEANUP(struct cache_read *, cache_read_end)

/*
 * Stores (or replaces) a value in one write transaction. Grows the map up to the limit, then evicts
 * the entries that were used least recently. -EFBIG: more than half the limit. -ENOSPC, -EIO, ...:
 * not stored, the cache remains usable.
 */
int cache_put(struct cache *cache, const struct cache_key *key, const void *data, size_t len,
              struct error *err);
/* Removes one entry: 0, or CACHE_MISS. */
int cache_remove(struct cache *cache, const struct digest *key, struct error *err);

/* ---- Building, one builder a key ---- */

struct cache_wait {
    const char *text; /* "kernel 'gemm': pid 42 builds it, waited 1200 ms (/var/cache/...)" */
    pid_t builder;    /* 0 when unknown (another pid namespace) */
    uint64_t waited_ms;
};

struct cache_build {
    /* Appends the value to *out; 0, or a negative errno with *err set: nothing is stored then. */
    int (*build)(void *ctx, struct buffer *out, struct error *err);
    void *ctx;
    /* Bound on waiting for another builder (not on building); <= 0: do not wait. */
    int64_t timeout_ms;
    int (*wait)(void *ctx, const struct cache_wait *wait); /* may be NULL; nonzero: give up */
    void *wait_ctx;
};

/*
 * The stored value, or builds it: one builder at a time per key among all threads and processes
 * that share the directory. If the builder dies another takes over within 10 ms; if its build
 * fails, the threads of its process that waited for it get its error, other processes try for
 * themselves. Returns 0 (found), CACHE_BUILT, CACHE_UNSTORED (the value is good, err says why it
 * was not stored), -ETIMEDOUT, -ECANCELED (wait gave up), or the build's own error. A cache that
 * fails costs only the caching: the value is built. A key that was damaged twice in this process is
 * built, not stored. cache may be NULL: always builds (CACHE_UNSTORED), for callers that go on
 * without a cache.
 */
int cache_get_or_build(struct cache *cache, const struct cache_key *key,
                       const struct cache_build *build, struct cache_value *ret_value,
                       struct error *err);

/* ---- Looking and managing ---- */

enum cache_state { CACHE_STATE_OK, CACHE_STATE_DAMAGED, CACHE_STATE_QUARANTINED };

struct cache_entry {
    struct digest key;
    unsigned kind;
    enum cache_state state;
    const char *reason; /* why not OK, else NULL */
    char subject[CACHE_SUBJECT_MAX + 1];
    uint64_t bytes;                   /* of the value */
    uint64_t stored_bytes;            /* of the record, header included */
    uint64_t created_ns, last_use_ns; /* CLOCK_REALTIME */
    const void *factors;              /* for cache_factor_next; NULL when damaged */
    size_t factors_len;
};

struct cache_factor {
    char name[CACHE_NAME_MAX + 1];
    char text[4 * CACHE_INLINE_MAX + 8]; /* printable: the value, or "digest (N bytes)" */
    const void *value;                   /* inline value, or its 16-byte digest */
    size_t value_len;                    /* of what `value` points to */
    uint64_t full_len;                   /* of the value that was added */
    bool is_digest;
};
/* Steps through an entry's factors; *pos starts at 0. False at the end or on malformed bytes. */
bool cache_factor_next(const void *factors, size_t len, size_t *pos, struct cache_factor *ret);

/*
 * Calls back for each entry (quarantined ones last) until a callback returns nonzero, which is then
 * returned. Payloads are not read. Pointers in the entry live for the callback only; it must not
 * call functions that store.
 */
int cache_iterate(struct cache *cache, int (*callback)(void *ctx, const struct cache_entry *entry),
                  void *ctx, struct error *err);

/*
 * Why cache_get misses, by the entry of the same kind and subject that differs in the fewest
 * factors. cause, a word for a counter: the name of the factor that differs ("device", "compiler",
 * "plan"), "several", "absent" when nothing like it is stored, "damaged", or "unknown". text, a
 * line for people: which factors differ, and what they were.
 */
#define CACHE_CAUSE_MAX (CACHE_NAME_MAX + 1)
struct cache_miss {
    char cause[CACHE_CAUSE_MAX];
    char text[256]; /* cut where it is longer */
};
void cache_explain_miss(struct cache *cache, const struct cache_key *key, struct cache_miss *ret);

struct cache_verify_result {
    uint64_t checked, damaged, bytes;
};
/* Reads and checks every value; damaged ones go to quarantine (not with read_only). */
int cache_verify(struct cache *cache, struct cache_verify_result *ret, struct error *err);

struct cache_gc_result {
    uint64_t removed, removed_bytes, kept, kept_bytes;
};
/*
 * Removes what was not used for max_age_s (0: any age stays), then the least recently used until at
 * most max_bytes of records remain (UINT64_MAX: no bound), and empties the quarantine. The file
 * does not shrink; its free pages are used again.
 */
int cache_gc(struct cache *cache, uint64_t max_bytes, uint64_t max_age_s,
             struct cache_gc_result *ret, struct error *err);

/* id, name: counters of this process since cache_open */
#define CACHE_COUNTERS(X)                                                                          \
    X(hits, "found")                                                                               \
    X(miss_absent, "missed: not stored")                                                           \
    X(miss_damaged, "missed: damaged, quarantined")                                                \
    X(miss_damaged_again, "missed: damaged again")                                                 \
    X(miss_error, "missed: the store failed")                                                      \
    X(puts, "stored")                                                                              \
    X(put_errors, "could not be stored")                                                           \
    X(evicted, "evicted for room")                                                                 \
    X(grown, "map growths")                                                                        \
    X(builds, "built")                                                                             \
    X(build_errors, "builds that failed")                                                          \
    X(waits, "waited for another builder")                                                         \
    X(wait_timeouts, "waits that timed out")

struct cache_stats {
#define X(id, name) uint64_t id;
    CACHE_COUNTERS(X)
#undef X
    uint64_t entries, live_bytes; /* live_bytes: pages in use by entries */
    uint64_t map_bytes, map_limit, file_bytes;
    uint64_t quarantined, quarantined_bytes;
};
/* Counters of this process since it opened the cache; sizes of the store now. */
int cache_stats(struct cache *cache, struct cache_stats *ret, struct error *err);

/* ---- Bundles: cache contents as one stream ---- */

/*
 * Writes all entries for which filter (may be NULL) returns true to fd. Damaged ones are left out.
 * *ret_count (may be NULL): how many.
 */
int cache_export(struct cache *cache, int fd,
                 bool (*filter)(void *ctx, const struct cache_entry *e), void *ctx,
                 uint64_t *ret_count, struct error *err);

struct cache_import_result {
    uint64_t imported, present, bytes; /* present: were there already, kept */
};
/*
 * Reads a bundle from fd (a pipe will do). Everything is checked before it is stored, each value is
 * stored whole or not at all; at the first malformed byte it stops with -EBADMSG, keeping what was
 * good before (*ret counts it in any case). A bundle holds code: import only what you trust.
 */
int cache_import(struct cache *cache, int fd, struct cache_import_result *ret, struct error *err);

#endif
