/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records in LMDB. The only file that touches LMDB.
 *
 * Files in the cache's directory: store.mdb and store.mdb-lock (LMDB's, MDB_NOSUBDIR), `lock`
 * (lockfile.h), store.mdb.old (a store that was moved aside; at most one), store.damaged (a marker:
 * LMDB reported a damaged tree, so the next opener moves the store aside).
 *
 * Databases:
 *   format      "version" → "EMBS", u32 STORE_VERSION
 *   values      key (16 bytes) → record (record.h)
 *   entries     key → u64 last use (ns since 1970), u64 bytes of the record, u64 subject hash, u16
 * kind subjects    u16 kind, u64 subject hash, key (big-endian: sorts by kind and subject) →
 * nothing quarantine  u64 time (big-endian), key → "EMBQ", u16 kind, u16 bytes of the reason, u64
 * bytes of the record, reason, the first QUARANTINE_KEEP bytes of the record All integers
 * little-endian but where said. values, entries and subjects change in one transaction.
 *
 * Writing: no MDB_WRITEMAP, so pages reach the file by pwrite: a full disk is an ENOSPC that aborts
 * the transaction, never a SIGBUS. MDB_NOMETASYNC: data is synced before the meta page that names
 * it, so a crash can lose the last transactions but not the tree. Last use is written lazily, in
 * batches.
 *
 * The map starts small and doubles up to the limit when LMDB says MDB_MAP_FULL; when another
 * process has grown it, MDB_MAP_RESIZED makes us adopt its size. Both need that no transaction of
 * this process is open: `users` counts them, resizing waits for zero for at most RESIZE_WAIT_MS.
 * Pages in use are kept below 7/8 of the limit by evicting the least recently used, since deleting
 * needs room as well (copy on write) and values need contiguous pages.
 *
 * Locking: `lock` guards users, resizing and env (replaced after MDB_PANIC); LMDB does the rest.
 */
#include "cache/store.h"

#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/fd.h"
#include "base/mem.h"
#include "cache/lockfile.h"
#include "cache/record.h"

#define RESIZE_WAIT_MS 2000
#define OPEN_LOCK_WAIT_MS 10000
#define MAX_READERS 1024
#define ENTRY_BYTES 26
#define SUBJECT_KEY_BYTES 26
#define QUARANTINE_HEAD 16
#define QUARANTINE_KEEP (64 * KIB)
#define QUARANTINE_ENTRIES 32
#define ROOM_SHORT 1 /* of a write body: evict first */

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

static const char *const db_names[DB_COUNT] = {
#define X(id, name) name,
    DATABASES(X)
#undef X
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

/* ---- Errors ---- */

static int errno_of(int rc)
{
    switch (rc) {
    case MDB_MAP_FULL:
        return ENOSPC;
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INVALID:
        return EBADMSG;
    case MDB_VERSION_MISMATCH:
        return ESTALE;
    case MDB_READERS_FULL:
    case MDB_MAP_RESIZED:
        return EBUSY;
    default:
        return rc > 0 ? rc : EIO;
    }
}

/* LMDB says EIO for a write that the file system cut short, which is how most full disks begin. */
static bool disk_is_full(struct store *s)
{
    struct statvfs fs;

    return !statvfs(s->dir, &fs) && (uint64_t)fs.f_bavail * fs.f_frsize < MIB;
}

/* Turns LMDB's code into ours; remembers what needs doing about it. */
static int fail(struct store *s, int rc, const char *what, struct error *err)
{
    if (rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND) {
        _cleanup_free_ char *marker = x_printf("%s/store.damaged", s->dir);
        if (!s->options.read_only)
            fd_close(open(marker, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    }
    if (rc == MDB_PANIC) {
        pthread_mutex_lock(&s->lock);
        s->panicked = true;
        pthread_mutex_unlock(&s->lock);
    }
    if (rc == EIO && disk_is_full(s))
        rc = ENOSPC;
    return error_set(err, errno_of(rc), "%s: %s: %s", s->path, what, mdb_strerror(rc));
}

/* ---- Opening ---- */

int store_set_aside(const char *dir, struct error *err)
{
    _cleanup_free_ char *from = x_printf("%s/" STORE_FILE, dir);
    _cleanup_free_ char *to = x_printf("%s/" STORE_FILE ".old", dir);
    _cleanup_free_ char *lock = x_printf("%s/" STORE_FILE "-lock", dir);
    _cleanup_free_ char *marker = x_printf("%s/store.damaged", dir);

    if (rename(from, to) < 0 && errno != ENOENT)
        return error_sys(err, errno, "%s: moving the store aside", from);
    unlink(lock);
    unlink(marker);
    return 0;
}

static int env_open(struct store *s)
{
    const struct store_options *o = &s->options;
    unsigned flags = MDB_NOSUBDIR | MDB_NOTLS | MDB_NOMETASYNC | (o->read_only ? MDB_RDONLY : 0);
    struct stat st;
    uint64_t map = MIN(o->initial, o->limit);

    if (!stat(s->path, &st))
        map = MAX(map, MIN(size_align((uint64_t)st.st_size, s->page), o->limit));
    int rc = mdb_env_create(&s->env);
    if (!rc)
        rc = mdb_env_set_maxdbs(s->env, DB_COUNT);
    if (!rc)
        rc = mdb_env_set_maxreaders(s->env, MAX_READERS);
    if (!rc)
        rc = mdb_env_set_mapsize(s->env, map);
    if (!rc)
        rc = mdb_env_open(s->env, s->path, flags, 0600);
    return rc;
}

static void env_close(struct store *s)
{
    if (s->env)
        mdb_env_close(s->env);
    s->env = NULL;
}

/* A file that ends before its last page would be a SIGBUS later. */
static bool file_is_short(struct store *s)
{
    MDB_envinfo info;
    MDB_stat stat_main;
    struct stat st;

    return mdb_env_info(s->env, &info) || mdb_env_stat(s->env, &stat_main) ||
           stat(s->path, &st) < 0 ||
           (uint64_t)st.st_size < ((uint64_t)info.me_last_pgno + 1) * stat_main.ms_psize;
}

static int format_write(struct store *s, MDB_txn *txn)
{
    uint8_t bytes[8] = {'E', 'M', 'B', 'S'};
    MDB_val key = {7, "version"}, data = {sizeof bytes, bytes};

    put_le(bytes + 4, 4, STORE_VERSION);
    return mdb_put(txn, s->db[DB_FORMAT], &key, &data, 0);
}

/* *ret_version: 0 for anything that is not ours. MDB_NOTFOUND: an empty environment. */
static int format_read(struct store *s, MDB_txn *txn, unsigned *ret_version)
{
    MDB_val key = {7, "version"}, data;
    MDB_stat stat;
    MDB_dbi main_db;
    int rc = mdb_dbi_open(txn, db_names[DB_FORMAT], 0, &s->db[DB_FORMAT]);

    if (!rc)
        rc = mdb_get(txn, s->db[DB_FORMAT], &key, &data);
    if (!rc) {
        bool ours = data.mv_size == 8 && !memcmp(data.mv_data, "EMBS", 4);
        *ret_version = ours ? (unsigned)get_le((uint8_t *)data.mv_data + 4, 4) : 0;
        return 0;
    }
    if (rc != MDB_NOTFOUND && rc != MDB_INCOMPATIBLE)
        return rc;
    rc = mdb_dbi_open(txn, NULL, 0, &main_db);
    if (!rc)
        rc = mdb_stat(txn, main_db, &stat);
    if (rc)
        return rc;
    *ret_version = 0;
    return stat.ms_entries ? 0 : MDB_NOTFOUND;
}

static int databases_open(struct store *s, unsigned flags, bool with_format)
{
    MDB_txn *txn = NULL;
    int rc = mdb_txn_begin(s->env, NULL, flags & MDB_CREATE ? 0 : MDB_RDONLY, &txn);

    for (int i = 0; !rc && i < DB_COUNT; i++)
        rc = mdb_dbi_open(txn, db_names[i], flags, &s->db[i]);
    if (!rc && with_format)
        rc = format_write(s, txn);
    if (rc && txn)
        mdb_txn_abort(txn);
    return rc ? rc : mdb_txn_commit(txn);
}

/* Checks the format and opens the databases. 0, or an LMDB code; *ret_version as found. */
static int env_check(struct store *s, unsigned *ret_version)
{
    MDB_txn *txn = NULL;
    int dead, rc;

    if (file_is_short(s))
        return MDB_CORRUPTED;
    if (!s->options.read_only)
        mdb_reader_check(s->env, &dead);
    rc = mdb_txn_begin(s->env, NULL, MDB_RDONLY, &txn);
    if (rc)
        return rc;
    rc = format_read(s, txn, ret_version);
    mdb_txn_abort(txn);
    if (rc == MDB_NOTFOUND && !s->options.read_only) {
        *ret_version = STORE_VERSION;
        return databases_open(s, MDB_CREATE, true);
    }
    if (rc || *ret_version != STORE_VERSION)
        return rc;
    return databases_open(s, 0, false);
}

static bool is_damage(int rc)
{
    return rc == MDB_INVALID || rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND ||
           rc == MDB_NOTFOUND || rc == MDB_INCOMPATIBLE;
}

static bool marked_damaged(struct store *s)
{
    _cleanup_free_ char *marker = x_printf("%s/store.damaged", s->dir);

    return !access(marker, F_OK);
}

/* One attempt. Why the store must be moved aside in *ret_aside, with -EBADMSG. */
static int open_once(struct store *s, const char **ret_aside, struct error *err)
{
    unsigned version = STORE_VERSION;

    *ret_aside = NULL;
    if (marked_damaged(s)) {
        *ret_aside = "its tree was found damaged";
        return error_set(err, EBADMSG, "%s: was found damaged", s->path);
    }
    int rc = env_open(s);
    if (!rc)
        rc = env_check(s, &version);
    if (!rc && version == STORE_VERSION)
        return 0;
    env_close(s);
    if (!rc && version > STORE_VERSION)
        return error_set(err, ESTALE,
                         "%s: written by store format %u, this build reads %d; use another cache "
                         "directory, or move the file away",
                         s->path, version, STORE_VERSION);
    if (!rc)
        *ret_aside = "it has an older format";
    else if (is_damage(rc))
        *ret_aside = "it is damaged";
    if (!rc)
        return error_set(err, EBADMSG, "%s: store format %u, this build reads %d", s->path, version,
                         STORE_VERSION);
    return error_set(err, errno_of(rc), "%s: cannot open: %s", s->path, mdb_strerror(rc));
}

static int open_locked(struct store *s, const char **ret_aside, struct error *err)
{
    const char *aside, *unused;
    int r = open_once(s, &aside, err);

    if (r < 0 && aside && !s->options.read_only) {
        r = store_set_aside(s->dir, err);
        if (!r)
            r = open_once(s, &unused, err);
        if (!r)
            *ret_aside = aside;
    }
    return r;
}

static void store_free(struct store *s)
{
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s->dir);
    free(s->path);
    free(s);
}

int store_open(const char *dir, const struct store_options *options, struct store **ret,
               const char **ret_aside, struct error *err)
{
    struct store *s = x_alloc(sizeof *s);
    pthread_condattr_t attr;
    const char *aside = NULL;

    s->dir = x_strdup(dir);
    s->path = x_printf("%s/" STORE_FILE, dir);
    s->page = (size_t)sysconf(_SC_PAGESIZE);
    s->options = *options;
    s->options.limit = MAX(size_align(options->limit, s->page), 64 * s->page);
    s->options.initial = MAX(size_align(options->initial, s->page), 32 * s->page);
    s->pid = getpid();
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->changed, &attr);
    pthread_condattr_destroy(&attr);
    int r = lockfile_lock(options->lock_fd, LOCKFILE_OPEN_BYTE, OPEN_LOCK_WAIT_MS);
    if (r < 0)
        r = error_sys(err, -r, "%s: another process is opening it", s->path);
    else {
        r = open_locked(s, &aside, err);
        lockfile_unlock(options->lock_fd, LOCKFILE_OPEN_BYTE);
    }
    if (r < 0) {
        store_free(s);
        return r;
    }
    *ret = s;
    *ret_aside = aside;
    return 0;
}

void store_close(struct store *s)
{
    if (!s)
        return;
    if (s->pid == getpid()) { /* a forked child must not touch the environment */
        bool locked = !lockfile_lock(s->options.lock_fd, LOCKFILE_OPEN_BYTE, 1000);
        env_close(s);
        if (locked)
            lockfile_unlock(s->options.lock_fd, LOCKFILE_OPEN_BYTE);
    }
    store_free(s);
}

/* ---- Transactions and the size of the map ---- */

static bool wait_until(struct store *s, const struct timespec *deadline)
{
    return pthread_cond_timedwait(&s->changed, &s->lock, deadline) != ETIMEDOUT;
}

static struct timespec deadline_in_ms(unsigned ms)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += (long)(ms % 1000) * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

/* Calls change() with no transaction of this process open. EBUSY when they do not end in time. */
static int exclusively(struct store *s, int (*change)(struct store *, uint64_t), uint64_t arg)
{
    struct timespec deadline = deadline_in_ms(RESIZE_WAIT_MS);
    int rc = EBUSY;

    pthread_mutex_lock(&s->lock);
    while (s->resizing && wait_until(s, &deadline))
        ;
    if (!s->resizing) {
        s->resizing = true;
        while (s->users && wait_until(s, &deadline))
            ;
        if (!s->users)
            rc = change(s, arg);
        s->resizing = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static int change_size(struct store *s, uint64_t size)
{
    return mdb_env_set_mapsize(s->env, size);
}

static int change_env(struct store *s, uint64_t unused)
{
    const char *aside;

    if (!s->panicked)
        return 0;
    env_close(s);
    if (open_once(s, &aside, NULL) < 0)
        return EIO; /* env stays NULL; the next transaction tries again */
    s->panicked = false;
    return 0;
}

static void leave(struct store *s)
{
    pthread_mutex_lock(&s->lock);
    if (!--s->users)
        pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static bool enter(struct store *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->resizing)
        pthread_cond_wait(&s->changed, &s->lock);
    bool good = !s->panicked;
    s->users += good;
    pthread_mutex_unlock(&s->lock);
    return good;
}

/* Counted in users until txn_end. */
static int txn_begin(struct store *s, unsigned flags, MDB_txn **ret)
{
    int dead, rc;

    for (int attempt = 0;; attempt++) {
        if (!enter(s)) {
            rc = exclusively(s, change_env, 0);
            if (rc || !enter(s))
                return rc ? rc : MDB_PANIC;
        }
        rc = mdb_txn_begin(s->env, NULL, flags, ret);
        if (!rc)
            return 0;
        leave(s);
        if (attempt == 8)
            return rc;
        if (rc == MDB_MAP_RESIZED)
            rc = exclusively(s, change_size, 0);
        else if (rc == MDB_READERS_FULL)
            rc = mdb_reader_check(s->env, &dead) || !dead ? MDB_READERS_FULL : 0;
        if (rc)
            return rc;
    }
}

static int txn_end(struct store *s, MDB_txn *txn, int rc)
{
    if (rc)
        mdb_txn_abort(txn);
    else if (fault_hit(FAULT_CACHE_FULL)) {
        mdb_txn_abort(txn);
        rc = ENOSPC;
    } else
        rc = mdb_txn_commit(txn);
    leave(s);
    return rc;
}

/* Doubles the map, up to the limit and `beyond`. False when it is there already or cannot. */
static bool grow(struct store *s, uint64_t beyond)
{
    MDB_envinfo info;
    uint64_t ceiling = s->options.limit + size_align(beyond, s->page);
    int dead;

    mdb_reader_check(s->env, &dead);
    if (mdb_env_info(s->env, &info) || info.me_mapsize >= ceiling)
        return false;
    uint64_t size = MIN(MAX(2 * (uint64_t)info.me_mapsize, s->options.initial), ceiling);
    if (exclusively(s, change_size, size))
        return false;
    atomic_fetch_add(&s->grown, 1);
    return true;
}

typedef int write_body(struct store *s, MDB_txn *txn, void *ctx);

/* One write transaction; grows the map for it as far as allowed. An LMDB code or ROOM_SHORT. */
static int update(struct store *s, write_body *body, void *ctx, uint64_t beyond)
{
    for (;;) {
        MDB_txn *txn;
        int rc = txn_begin(s, 0, &txn);
        if (rc)
            return rc;
        rc = fault_hit(FAULT_CACHE_PUT) ? MDB_MAP_FULL : body(s, txn, ctx);
        rc = txn_end(s, txn, rc);
        if (rc != MDB_MAP_FULL || !grow(s, beyond))
            return rc;
    }
}

/* ---- Entries ---- */

static MDB_val val_of(const void *data, size_t len)
{
    return (MDB_val){len, (void *)data};
}

static void subject_key(uint8_t out[SUBJECT_KEY_BYTES], unsigned kind, uint64_t subject,
                        const struct digest *key)
{
    for (int i = 0; i < 2; i++)
        out[i] = (uint8_t)(kind >> (8 - 8 * i));
    for (int i = 0; i < 8; i++)
        out[2 + i] = (uint8_t)(subject >> (56 - 8 * i));
    memcpy(out + 10, key, sizeof *key);
}

static int entry_read(struct store *s, MDB_txn *txn, const struct digest *key,
                      struct store_entry *ret)
{
    MDB_val k = val_of(key, sizeof *key), v;
    int rc = mdb_get(txn, s->db[DB_ENTRIES], &k, &v);

    *ret = (struct store_entry){.key = *key};
    if (rc || v.mv_size != ENTRY_BYTES)
        return rc ? rc : MDB_CORRUPTED;
    ret->last_use_ns = get_le(v.mv_data, 8);
    ret->size = get_le((uint8_t *)v.mv_data + 8, 8);
    ret->subject = get_le((uint8_t *)v.mv_data + 16, 8);
    ret->kind = (unsigned)get_le((uint8_t *)v.mv_data + 24, 2);
    return 0;
}

static int entry_write(struct store *s, MDB_txn *txn, const struct store_entry *entry)
{
    uint8_t bytes[ENTRY_BYTES];
    MDB_val k = val_of(&entry->key, sizeof entry->key), v = val_of(bytes, sizeof bytes);

    put_le(bytes, 8, entry->last_use_ns);
    put_le(bytes + 8, 8, entry->size);
    put_le(bytes + 16, 8, entry->subject);
    put_le(bytes + 24, 2, entry->kind);
    return mdb_put(txn, s->db[DB_ENTRIES], &k, &v, 0);
}

static int del_if_there(MDB_txn *txn, MDB_dbi db, const void *key, size_t len)
{
    MDB_val k = val_of(key, len);
    int rc = mdb_del(txn, db, &k, NULL);

    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* Removes a key from the three databases; MDB_NOTFOUND when it has no value. */
static int remove_key(struct store *s, MDB_txn *txn, const struct digest *key)
{
    uint8_t index[SUBJECT_KEY_BYTES];
    struct store_entry entry;
    MDB_val k = val_of(key, sizeof *key);
    int rc = entry_read(s, txn, key, &entry);

    if (!rc) {
        subject_key(index, entry.kind, entry.subject, key);
        rc = del_if_there(txn, s->db[DB_SUBJECTS], index, sizeof index);
        if (!rc)
            rc = del_if_there(txn, s->db[DB_ENTRIES], key, sizeof *key);
    } else if (rc == MDB_NOTFOUND)
        rc = 0;
    return rc ? rc : mdb_del(txn, s->db[DB_VALUES], &k, NULL);
}

/* Bytes of the pages that the databases use. */
static int live_bytes(struct store *s, MDB_txn *txn, uint64_t *ret)
{
    uint64_t pages = 0;

    for (int i = 0; i < DB_COUNT; i++) {
        MDB_stat stat;
        int rc = mdb_stat(txn, s->db[i], &stat);
        if (rc)
            return rc;
        pages += stat.ms_branch_pages + stat.ms_leaf_pages + stat.ms_overflow_pages;
    }
    *ret = pages * s->page;
    return 0;
}

/* ---- Reading ---- */

int store_read_begin(struct store *s, struct store_read **ret, struct error *err)
{
    MDB_txn *txn;
    int rc = txn_begin(s, MDB_RDONLY, &txn);

    if (rc)
        return fail(s, rc, "beginning to read", err);
    struct store_read *read = x_alloc(sizeof *read);
    read->store = s;
    read->txn = txn;
    *ret = read;
    return 0;
}

void store_read_end(struct store_read *read)
{
    if (!read)
        return;
    mdb_txn_abort(read->txn);
    leave(read->store);
    free(read);
}

int store_read_record(struct store_read *read, const struct digest *key, const void **ret_bytes,
                      size_t *ret_len, struct store_entry *ret_entry, struct error *err)
{
    struct store *s = read->store;
    MDB_val k = val_of(key, sizeof *key), v;
    int rc = mdb_get(read->txn, s->db[DB_VALUES], &k, &v);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    if (rc)
        return fail(s, rc, "reading a value", err);
    if (ret_entry)
        entry_read(s, read->txn, key, ret_entry); /* zeros will do when it is missing */
    *ret_bytes = v.mv_data;
    *ret_len = v.mv_size;
    return 0;
}

static void cursor_closep(MDB_cursor **cursor)
{
    if (*cursor)
        mdb_cursor_close(*cursor);
}
#define _cleanup_cursor_ _cleanup_(cursor_closep)

int store_scan(struct store_read *read, store_scan_fn *callback, void *ctx, struct error *err)
{
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    struct store_entry entry;
    MDB_val k, v;
    int r, rc = mdb_cursor_open(read->txn, s->db[DB_VALUES], &cursor);

    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT))) {
        struct digest key;
        if (k.mv_size != sizeof key)
            continue;
        memcpy(&key, k.mv_data, sizeof key);
        entry_read(s, read->txn, &key, &entry);
        r = callback(ctx, &entry, v.mv_data, v.mv_size);
        if (r)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : fail(s, rc, "listing values", err);
}

int store_scan_subject(struct store_read *read, unsigned kind, uint64_t subject,
                       store_scan_fn *callback, void *ctx, struct error *err)
{
    static const struct digest first;
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    uint8_t from[SUBJECT_KEY_BYTES];
    struct store_entry entry;
    MDB_val k = val_of(from, sizeof from), v;
    int rc = mdb_cursor_open(read->txn, s->db[DB_SUBJECTS], &cursor);

    subject_key(from, kind, subject, &first);
    if (!rc)
        rc = mdb_cursor_get(cursor, &k, &v, MDB_SET_RANGE);
    for (; !rc; rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT)) {
        const void *bytes;
        size_t len;
        struct digest key;
        if (k.mv_size != sizeof from || memcmp(k.mv_data, from, 10))
            return 0;
        memcpy(&key, (uint8_t *)k.mv_data + 10, sizeof key);
        int r = store_read_record(read, &key, &bytes, &len, &entry, err);
        if (!r)
            r = callback(ctx, &entry, bytes, len);
        if (r && r != STORE_ABSENT)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : fail(s, rc, "searching by subject", err);
}

int store_scan_quarantine(struct store_read *read,
                          int (*callback)(void *ctx, const struct store_entry *entry,
                                          const char *reason, const void *bytes, size_t len),
                          void *ctx, struct error *err)
{
    struct store *s = read->store;
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    MDB_val k, v;
    int rc = mdb_cursor_open(read->txn, s->db[DB_QUARANTINE], &cursor);

    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT))) {
        const uint8_t *p = v.mv_data;
        char reason[ERROR_TEXT_MAX];
        if (k.mv_size != 24 || v.mv_size < QUARANTINE_HEAD || memcmp(p, "EMBQ", 4))
            continue;
        size_t reason_len = get_le(p + 6, 2);
        if (reason_len >= sizeof reason || reason_len > v.mv_size - QUARANTINE_HEAD)
            continue;
        struct store_entry entry = {.kind = (unsigned)get_le(p + 4, 2), .size = get_le(p + 8, 8)};
        for (int i = 0; i < 8; i++)
            entry.last_use_ns = entry.last_use_ns << 8 | ((uint8_t *)k.mv_data)[i];
        memcpy(&entry.key, (uint8_t *)k.mv_data + 8, sizeof entry.key);
        memcpy(reason, p + QUARANTINE_HEAD, reason_len);
        reason[reason_len] = 0;
        int r = callback(ctx, &entry, reason, p + QUARANTINE_HEAD + reason_len,
                         v.mv_size - QUARANTINE_HEAD - reason_len);
        if (r)
            return r;
    }
    return rc == MDB_NOTFOUND ? 0 : fail(s, rc, "listing the quarantine", err);
}

/* ---- Writing ---- */

struct trim {
    uint64_t max_bytes; /* of entries' records; used when max_live is 0 */
    uint64_t max_live;  /* of pages; 0: not by pages */
    uint64_t min_free;  /* remove at least so many bytes of pages */
    uint64_t older_than_ns;
    bool drop_quarantine;
    uint64_t removed, bytes;
};

static int by_last_use(const void *a, const void *b)
{
    const struct store_entry *x = a, *y = b;

    return x->last_use_ns < y->last_use_ns ? -1 : x->last_use_ns > y->last_use_ns;
}

static int list_entries(struct store *s, MDB_txn *txn, struct store_entry **ret, size_t *ret_n)
{
    _cleanup_cursor_ MDB_cursor *cursor = NULL;
    MDB_stat stat;
    MDB_val k, v;
    size_t n = 0;
    int rc = mdb_stat(txn, s->db[DB_ENTRIES], &stat);

    if (rc)
        return rc;
    _cleanup_free_ struct store_entry *list = mem_alloc(stat.ms_entries, sizeof *list);
    if (!list)
        return ENOMEM;
    rc = mdb_cursor_open(txn, s->db[DB_ENTRIES], &cursor);
    while (!rc && !(rc = mdb_cursor_get(cursor, &k, &v, MDB_NEXT)) && n < stat.ms_entries) {
        struct digest key;
        if (k.mv_size != sizeof key)
            continue;
        memcpy(&key, k.mv_data, sizeof key);
        rc = entry_read(s, txn, &key, &list[n++]);
    }
    if (rc && rc != MDB_NOTFOUND)
        return rc;
    qsort(list, n, sizeof *list, by_last_use);
    *ret = TAKE(list);
    *ret_n = n;
    return 0;
}

/* What removing an entry gives back, in bytes of pages. */
static uint64_t page_bytes(struct store *s, uint64_t size)
{
    return size > s->page / 2 - 64 ? size_align(size + 16, s->page) : size;
}

static int trim_body(struct store *s, MDB_txn *txn, void *ctx)
{
    struct trim *t = ctx;
    _cleanup_free_ struct store_entry *list = NULL;
    size_t n = 0;
    uint64_t live, total = 0, freed = 0;
    int rc = list_entries(s, txn, &list, &n);

    if (!rc)
        rc = live_bytes(s, txn, &live);
    if (!rc && t->drop_quarantine)
        rc = mdb_drop(txn, s->db[DB_QUARANTINE], 0);
    if (rc)
        return rc;
    t->removed = t->bytes = 0;
    for (size_t i = 0; i < n; i++)
        total += list[i].size;
    for (size_t i = 0; i < n; i++) {
        bool big = t->max_live ? live > t->max_live : total > t->max_bytes;
        if (!big && freed >= t->min_free && list[i].last_use_ns >= t->older_than_ns)
            break;
        rc = remove_key(s, txn, &list[i].key);
        if (rc && rc != MDB_NOTFOUND)
            return rc;
        uint64_t pages = page_bytes(s, list[i].size);
        live -= MIN(live, pages);
        freed += pages;
        total -= list[i].size;
        t->removed++;
        t->bytes += list[i].size;
    }
    return 0;
}

/* Deleting copies pages first: it may go so far beyond the limit. */
static uint64_t trim_headroom(struct store *s)
{
    return MAX(s->options.limit / 8, MIB);
}

static int trim(struct store *s, struct trim *t)
{
    return update(s, trim_body, t, trim_headroom(s));
}

/* Any change: LMDB uses a page again in the second transaction after the one that freed it. */
static int tick_body(struct store *s, MDB_txn *txn, void *unused)
{
    return format_write(s, txn);
}

int store_trim(struct store *s, uint64_t max_bytes, uint64_t older_than_ns, bool drop_quarantine,
               uint64_t *ret_removed, uint64_t *ret_bytes, struct error *err)
{
    struct trim t = {
        .max_bytes = max_bytes, .older_than_ns = older_than_ns, .drop_quarantine = drop_quarantine};
    int rc = trim(s, &t);

    if (rc)
        return fail(s, rc, "removing old entries", err);
    update(s, tick_body, NULL, trim_headroom(s)); /* only speeds up the reuse */
    *ret_removed = t.removed;
    *ret_bytes = t.bytes;
    return 0;
}

struct put {
    const struct store_entry *entry;
    const void *head, *payload;
    size_t head_len, payload_len;
    uint64_t need;
};

static int put_body(struct store *s, MDB_txn *txn, void *ctx)
{
    struct put *p = ctx;
    uint8_t index[SUBJECT_KEY_BYTES];
    uint64_t live;
    MDB_val k = val_of(&p->entry->key, sizeof p->entry->key), v;
    int rc = remove_key(s, txn, &p->entry->key);

    if (!rc || rc == MDB_NOTFOUND)
        rc = live_bytes(s, txn, &live);
    if (rc)
        return rc;
    if (live + p->need > s->options.limit / 8 * 7)
        return ROOM_SHORT;
    v = val_of(NULL, p->head_len + p->payload_len);
    rc = mdb_put(txn, s->db[DB_VALUES], &k, &v, MDB_RESERVE);
    if (rc)
        return rc;
    memcpy(v.mv_data, p->head, p->head_len);
    if (p->payload_len)
        memcpy((uint8_t *)v.mv_data + p->head_len, p->payload, p->payload_len);
    rc = entry_write(s, txn, p->entry);
    subject_key(index, p->entry->kind, p->entry->subject, &p->entry->key);
    k = val_of(index, sizeof index);
    v = val_of("", 0);
    return rc ? rc : mdb_put(txn, s->db[DB_SUBJECTS], &k, &v, 0);
}

/* Evicts for a value of `need` bytes of pages; more in each round. */
static int make_room(struct store *s, uint64_t need, unsigned round)
{
    uint64_t target = s->options.limit / 4 * 3;
    struct trim t = {.max_live = target > need ? target - need : 1};
    if (round)
        t.min_free = need << MIN(round, 8u);
    int rc = trim(s, &t);

    if (rc)
        return rc;
    atomic_fetch_add(&s->evicted, t.removed);
    if (!t.removed) /* in round 0 there may be pages enough, but not in one run */
        return round ? MDB_MAP_FULL : 0;
    rc = update(s, tick_body, NULL, trim_headroom(s));
    return rc == MDB_MAP_FULL ? 0 : rc;
}

int store_put(struct store *s, const struct store_entry *entry, const void *head, size_t head_len,
              const void *payload, size_t payload_len, struct error *err)
{
    uint64_t size = entry->size;
    struct put p = {entry,    head,        payload,
                    head_len, payload_len, size_align(size + 16, s->page) + 4 * s->page};

    if (size > s->options.limit / 2 || p.need > s->options.limit / 4 * 3)
        return error_set(err, EFBIG, "%s: a value of %llu bytes, the cache is limited to %llu",
                         s->path, (unsigned long long)size, (unsigned long long)s->options.limit);
    for (unsigned round = 0;; round++) {
        int rc = update(s, put_body, &p, 0);
        if (rc == ROOM_SHORT || rc == MDB_MAP_FULL) {
            int r = round < 12 ? make_room(s, p.need, round) : MDB_MAP_FULL;
            if (!r)
                continue;
            return error_set(err, errno_of(r),
                             "%s: full (limit %llu bytes) and nothing more can be evicted: %s",
                             s->path, (unsigned long long)s->options.limit, mdb_strerror(r));
        }
        return rc ? fail(s, rc, "storing a value", err) : 0;
    }
}

static int delete_body(struct store *s, MDB_txn *txn, void *ctx)
{
    return remove_key(s, txn, ctx);
}

int store_delete(struct store *s, const struct digest *key, struct error *err)
{
    int rc = update(s, delete_body, (void *)key, MIB);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    return rc ? fail(s, rc, "removing an entry", err) : 0;
}

struct touch {
    const struct digest *keys;
    size_t n;
    uint64_t now_ns;
};

static int touch_body(struct store *s, MDB_txn *txn, void *ctx)
{
    const struct touch *t = ctx;
    struct store_entry entry;

    for (size_t i = 0; i < t->n; i++) {
        int rc = entry_read(s, txn, &t->keys[i], &entry);
        if (rc == MDB_NOTFOUND)
            continue;
        entry.last_use_ns = t->now_ns;
        if (!rc)
            rc = entry_write(s, txn, &entry);
        if (rc)
            return rc;
    }
    return 0;
}

int store_touch(struct store *s, const struct digest *keys, size_t n, uint64_t now_ns,
                struct error *err)
{
    struct touch t = {keys, n, now_ns};
    int rc = update(s, touch_body, &t, 0);

    return rc ? fail(s, rc, "noting the last use", err) : 0;
}

/* ---- Quarantine ---- */

struct quarantine {
    const struct digest *key;
    const char *reason;
    bool (*still_bad)(const struct digest *key, const void *bytes, size_t len);
};

/* Keeps the newest QUARANTINE_ENTRIES - 1. */
static int quarantine_shorten(struct store *s, MDB_txn *txn)
{
    MDB_stat stat;
    int rc = mdb_stat(txn, s->db[DB_QUARANTINE], &stat);

    for (size_t n = rc ? 0 : stat.ms_entries; !rc && n >= QUARANTINE_ENTRIES; n--) {
        _cleanup_cursor_ MDB_cursor *cursor = NULL;
        MDB_val k, v;
        rc = mdb_cursor_open(txn, s->db[DB_QUARANTINE], &cursor);
        if (!rc)
            rc = mdb_cursor_get(cursor, &k, &v, MDB_FIRST);
        if (!rc)
            rc = mdb_cursor_del(cursor, 0);
    }
    return rc;
}

static int quarantine_body(struct store *s, MDB_txn *txn, void *ctx)
{
    const struct quarantine *q = ctx;
    _cleanup_free_ uint8_t *bytes = NULL;
    struct store_entry entry;
    struct timespec now;
    uint8_t key[24];
    MDB_val k = val_of(q->key, sizeof *q->key), v;
    int rc = mdb_get(txn, s->db[DB_VALUES], &k, &v);

    if (rc)
        return rc;
    if (!q->still_bad(q->key, v.mv_data, v.mv_size))
        return MDB_NOTFOUND;
    entry_read(s, txn, q->key, &entry);
    size_t reason_len = MIN(strlen(q->reason), ERROR_TEXT_MAX - 1);
    size_t keep = MIN(v.mv_size, MIN(QUARANTINE_KEEP, s->options.limit / 256));
    size_t len = QUARANTINE_HEAD + reason_len + keep;
    bytes = mem_alloc(len, 1);
    if (!bytes)
        return ENOMEM;
    memcpy(bytes, "EMBQ", 4);
    put_le(bytes + 4, 2, entry.kind);
    put_le(bytes + 6, 2, reason_len);
    put_le(bytes + 8, 8, v.mv_size);
    memcpy(bytes + QUARANTINE_HEAD, q->reason, reason_len);
    memcpy(bytes + QUARANTINE_HEAD + reason_len, v.mv_data, keep);
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    for (int i = 0; i < 8; i++)
        key[i] = (uint8_t)(ns >> (56 - 8 * i));
    memcpy(key + 8, q->key, sizeof *q->key);
    rc = remove_key(s, txn, q->key);
    if (!rc)
        rc = quarantine_shorten(s, txn);
    k = val_of(key, sizeof key);
    v = val_of(bytes, len);
    return rc ? rc : mdb_put(txn, s->db[DB_QUARANTINE], &k, &v, 0);
}

int store_quarantine(struct store *s, const struct digest *key, const char *reason,
                     bool (*still_bad)(const struct digest *key, const void *bytes, size_t len),
                     struct error *err)
{
    struct quarantine q = {key, reason, still_bad};
    int rc = update(s, quarantine_body, &q, MIB);

    if (rc == MDB_NOTFOUND)
        return STORE_ABSENT;
    return rc ? fail(s, rc, "moving a damaged value to quarantine", err) : 0;
}

/* ---- Figures ---- */

int store_info(struct store *s, struct store_info *ret, struct error *err)
{
    struct store_info info = {.grown = atomic_load(&s->grown), .evicted = atomic_load(&s->evicted)};
    MDB_stat values, quarantine;
    MDB_envinfo env;
    MDB_txn *txn;
    struct stat st;
    int rc = txn_begin(s, MDB_RDONLY, &txn);

    if (rc)
        return fail(s, rc, "reading its figures", err);
    rc = mdb_stat(txn, s->db[DB_VALUES], &values);
    if (!rc)
        rc = mdb_stat(txn, s->db[DB_QUARANTINE], &quarantine);
    if (!rc)
        rc = live_bytes(s, txn, &info.live_bytes);
    if (!rc)
        rc = mdb_env_info(s->env, &env);
    mdb_txn_abort(txn);
    leave(s);
    if (rc)
        return fail(s, rc, "reading its figures", err);
    info.entries = values.ms_entries;
    info.map_bytes = env.me_mapsize;
    info.quarantined = quarantine.ms_entries;
    info.quarantined_bytes = s->page * (quarantine.ms_branch_pages + quarantine.ms_leaf_pages +
                                        quarantine.ms_overflow_pages);
    info.file_bytes = stat(s->path, &st) < 0 ? 0 : (uint64_t)st.st_size;
    *ret = info;
    return 0;
}
