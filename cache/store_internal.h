/* SPDX-License-Identifier: Apache-2.0 */
/* Internal to store.c (environment, transactions; the format is told there) and store_data.c. */
#ifndef EMBER_CACHE_STORE_INTERNAL_H
#define EMBER_CACHE_STORE_INTERNAL_H

#include <lmdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/mem.h"
#include "cache/store.h"

#define DATABASES(X)                                                                               \
    X(DB_FORMAT, "format")                                                                         \
    X(DB_VALUES, "values")                                                                         \
    X(DB_ENTRIES, "entries")                                                                       \
    X(DB_SUBJECTS, "subjects")                                                                     \
    X(DB_QUARANTINE, "quarantine")

enum {
#define X(id, name) id,
    DATABASES(X)
#undef X
        DB_COUNT
};

struct store {
    char *dir, *path;
    struct store_options options;
    pid_t pid;
    size_t page;
    MDB_env *env;
    MDB_dbi db[DB_COUNT];
    pthread_mutex_t lock;
    pthread_cond_t changed;
    unsigned users;
    bool resizing, panicked;
    atomic_ullong grown, evicted;
};

struct store_read {
    struct store *store;
    MDB_txn *txn;
};

/* Turns LMDB's code into ours and sets *err; remembers what needs doing about it. */
int store_fail(struct store *s, int rc, const char *what, struct error *err);

/* Begins a transaction, which counts as a user of the map until store_txn_left. An LMDB code. */
int store_txn_begin(struct store *s, unsigned flags, MDB_txn **ret);
void store_txn_left(struct store *s);

typedef int write_body(struct store *s, MDB_txn *txn, void *ctx);
/*
 * Runs body in one write transaction and commits when it returns 0. Grows the map as far as the
 * limit and `beyond` allow, running body again. An LMDB code, or what body returned.
 */
int store_update(struct store *s, write_body *body, void *ctx, uint64_t beyond);

int store_format_write(struct store *s, MDB_txn *txn);

static inline MDB_val val_of(const void *data, size_t len)
{
    return (MDB_val){len, (void *)data};
}

static inline void cursor_closep(MDB_cursor **cursor)
{
    if (*cursor)
        mdb_cursor_close(*cursor);
}
#define _cleanup_cursor_ _cleanup_(cursor_closep)

#endif
