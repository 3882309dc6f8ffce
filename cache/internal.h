/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to cache/: what cache.c, manage.c, explain.c and bundle.c share. */
#ifndef EMBER_CACHE_INTERNAL_H
#define EMBER_CACHE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "cache/cache.h"
#include "cache/record.h"
#include "cache/store.h"

#define CACHE_PENDING 128 /* uses to be noted with the next write */
#define CACHE_DAMAGED 64  /* keys that were damaged in this process */

struct cache_counters {
#define X(id, name) atomic_ullong id;
    CACHE_COUNTERS(X)
#undef X
};

struct cache {
    struct cache *next; /* in the list of the process's caches */
    pid_t pid;
    uint64_t dev, ino;
    char *dir;
    int lock_fd;
    bool read_only;
    uint64_t limit, use_ns;
    unsigned warnings;
    char *warning_text;
    struct store *store;
    struct flights *flights;
    struct cache_counters counters;
    pthread_mutex_t lock; /* guards what follows */
    struct digest pending[CACHE_PENDING];
    size_t n_pending;
    struct digest damaged[CACHE_DAMAGED];
    size_t n_damaged;
};

#define COUNT(cache, id) atomic_fetch_add_explicit(&(cache)->counters.id, 1, memory_order_relaxed)

static inline uint64_t wall_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* -ECHILD after a fork, else 0. */
int cache_check_process(const struct cache *cache, struct error *err);
/* True when the bytes are not the whole record of key, for store_quarantine. */
bool cache_record_is_bad(const struct digest *key, const void *bytes, size_t len);
/* Moves a damaged record away; CACHE_MISS_DAMAGED or _AGAIN, with err saying why and where it is.
 */
int cache_quarantine(struct cache *cache, const struct digest *key, const char *label,
                     const char *reason, struct error *err);
/* Fills an entry from stored bytes; reason_buf holds the text of a damaged one. */
void cache_entry_fill(struct cache_entry *entry, const struct store_entry *stored,
                      const void *bytes, size_t len, struct error *reason_buf);

#endif
