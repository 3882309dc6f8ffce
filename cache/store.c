/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records in LMDB: opening, transactions, the size of the map. No file but this and
 * store_data.c touches LMDB.
 *
 * Files in the cache's directory: store.mdb and store.mdb-lock (LMDB's, MDB_NOSUBDIR), `lock`
 * (lockfile.h), store.mdb.old (a store that was moved aside; at most one), store.damaged (a marker:
 * LMDB reported a damaged tree, so the next opener moves the store aside).
 *
 * Databases (docs/cache-format.md has them in full):
 *
 *   format      "version" → "EMBS", u32 STORE_VERSION
 *   values      key (16 bytes) → record (record.h)
 *   entries     key → u64 last use, u64 bytes of the record, u64 subject hash, u16 kind
 *   subjects    u16 kind, u64 subject hash (big-endian: sorts by both), key → nothing
 *   quarantine  u64 time (big-endian), key → "EMBQ", u16 kind, u16 bytes of the reason,
 *               u64 bytes of the record, reason, the record's first QUARANTINE_KEEP bytes
 *
 * Integers are little-endian but where said, times ns since 1970. values, entries and subjects
 * change in one transaction.
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
#include "cache/store_internal.h"

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

static const char *const db_names[DB_COUNT] = {
#define X(id, name) name,
    DATABASES(X)
#undef X
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
int store_fail(struct store *s, int rc, const char *what, struct error *err)
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

int store_format_write(struct store *s, MDB_txn *txn)
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
        rc = store_format_write(s, txn);
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

void store_txn_left(struct store *s)
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
int store_txn_begin(struct store *s, unsigned flags, MDB_txn **ret)
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
        store_txn_left(s);
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
    store_txn_left(s);
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

/* One write transaction; grows the map for it as far as allowed. An LMDB code or ROOM_SHORT. */
int store_update(struct store *s, write_body *body, void *ctx, uint64_t beyond)
{
    for (;;) {
        MDB_txn *txn;
        int rc = store_txn_begin(s, 0, &txn);
        if (rc)
            return rc;
        rc = fault_hit(FAULT_CACHE_PUT) ? MDB_MAP_FULL : body(s, txn, ctx);
        rc = txn_end(s, txn, rc);
        if (rc != MDB_MAP_FULL || !grow(s, beyond))
            return rc;
    }
}
